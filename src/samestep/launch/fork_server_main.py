"""Imported first by the server that ranks are forked from, and by no other process: when it is done, it ends at once.

Otherwise the interpreter takes all of PyTorch apart first, and a program that reads a job's output to its end waits.
"""

import atexit
import gc
import os
import signal
from types import FrameType


def _end(server: int) -> None:
    # A rank that is forked from the server has its exit functions, but an exit code of its own to tell.
    if os.getpid() == server:
        os._exit(0)


atexit.register(_end, os.getpid())

# A signal to all of a job's processes must not take the server away, through which the starting process hears of its
# ranks' ends. They set their own handlers as they begin.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)

# Imports make objects that stay; to look for garbage among them takes a tenth of their time.
gc.disable()


# The process that started the server may be killed while it imports, which takes seconds; later it waits for that.
_STARTER = os.getppid()


def _end_without_starter(number: int, frame: FrameType | None) -> None:
    """A signal handler: when the parent has changed, the starter is gone."""
    if os.getppid() != _STARTER:
        os._exit(1)


signal.signal(signal.SIGALRM, _end_without_starter)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)


def _before_a_rank() -> None:
    """All is imported when the first rank is forked."""
    if gc.isenabled():
        return
    # From now on the server waits for its starter's end by itself.
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Else each rank's first collection writes to every page that it shares with the server, which then is copied.
    gc.freeze()
    gc.enable()


os.register_at_fork(before=_before_a_rank)
