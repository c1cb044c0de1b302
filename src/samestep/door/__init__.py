"""The one door for a job: `check()` reads and settles its layout, makes all checks in order, and builds its task.

What the commands and the ranks take from there is a `Ready` job: nothing behind the door reads a layout's text or
checks a key again.

- `entry`: the checks in their order, up to the task's contract, which is the last.
- `layouts`: a job's layout from its text, and as the engine's configuration completes it; `preflight`: the checks of
  a settled job against its engine, this machine and its task.
- `ready`: the checked job, as its ranks get it; `rounds`: a job in a later round of its ranks.
"""

from samestep.door.entry import check, hold_contract
from samestep.door.layouts import layout_named, layout_of, settle
from samestep.door.ready import Ready

__all__ = ["Ready", "check", "hold_contract", "layout_named", "layout_of", "settle"]
