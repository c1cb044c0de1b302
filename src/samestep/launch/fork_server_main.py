"""First import of the fork server, and of no other process: makes the server exit at once when it is done.

Otherwise the interpreter would first tear down all of PyTorch, while a program that reads a job's output to its end
waits.
"""

import atexit
import gc
import os
import signal
from functools import partial
from types import FrameType


def _end(server: int) -> None:
    # A forked rank inherits this exit function, but must keep its own exit code.
    if os.getpid() == server:
        os._exit(0)


atexit.register(_end, os.getpid())

# Signals to all processes of a job must not end the server, which reports the ends of the ranks to the starting
# process. Ranks set their own handlers when they start.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)

# Collections during imports would take a tenth of their time, and the objects stay.
gc.disable()


# The server polls whether the process that started it was killed: while it imports, for seconds, and later. The end
# of its pipe from the starter doesn't tell it, as each rank holds an end of that pipe too. The kernel ends the ranks
# with the server: a rank that is stopped, or whose native code holds Python's lock, can't end itself.
_STARTER = os.getppid()
_IMPORTING, _SERVING = 0.2, 1.0  # seconds between two polls


def _end_without_starter(number: int, frame: FrameType | None) -> None:
    """Timer handler: exits if the parent has changed, since the starter has ended."""
    if os.getppid() != _STARTER:
        os._exit(1)


signal.signal(signal.SIGALRM, _end_without_starter)
signal.setitimer(signal.ITIMER_REAL, _IMPORTING, _IMPORTING)


def _before_a_rank() -> None:
    """Before the first fork of a rank, when all is imported: poll less often, and freeze the objects."""
    if gc.isenabled():
        return
    signal.setitimer(signal.ITIMER_REAL, _SERVING, _SERVING)
    # Otherwise each rank's first collection would write to all pages shared with the server, and copy them.
    gc.freeze()
    gc.enable()


def _in_a_rank(server: int) -> None:
    """In a forked rank, which has no timer: reset the handler. A rank's own children keep the rank's handlers."""
    if os.getppid() == server:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


os.register_at_fork(before=_before_a_rank, after_in_child=partial(_in_a_rank, os.getpid()))
