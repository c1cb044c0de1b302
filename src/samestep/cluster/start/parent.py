"""A process that ends with the one that started it, even if that was killed."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>; what a process becomes by exec keeps it


def end_with_parent() -> None:
    """Have the system kill this process when its parent is gone; without effect where it can't, as on macOS."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was gone before it could be said
        os._exit(1)
