"""A process that ends with the one that started it, even if that was killed."""

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>; what a process becomes by exec keeps it


def end_with_parent() -> None:
    """Have the system kill this process when its parent is gone; without effect where it can't, as on macOS."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was gone before it could be said
        os._exit(1)


def end_with_starter() -> None:
    """In a new process of multiprocessing's: end it when the one that started it is gone, even if that was killed.

    That process is not the system's parent of a rank which a server has forked: the server lives on as long as any
    of its ranks.
    """
    import multiprocessing  # a rank that becomes another program is to start without it

    starter = multiprocessing.parent_process()
    assert starter is not None

    def wait() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
