"""Memory that was freed goes back to the system: PyTorch's aligned blocks may not be found again by glibc.

It keeps freed blocks for later ones. One that was aligned is a little too small for the next of the same size, so
reading one tensor after another would take as much memory as all of them.
"""

import ctypes
import sys


def give_back() -> None:
    """Give back what is free, where the C library can; it takes about a millisecond."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
