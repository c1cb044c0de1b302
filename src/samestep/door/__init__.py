"""The one door for a job: `check` reads and settles its layout, makes all checks in order, and builds its task.

What the commands and the ranks take from there is a `Ready` job: nothing behind the door reads a layout's text or
checks a key again.
"""

from samestep.door.entry import check, hold_contract
from samestep.door.layouts import layout_named, layout_of, settle
from samestep.door.ready import Ready

__all__ = ["Ready", "check", "hold_contract", "layout_named", "layout_of", "settle"]
