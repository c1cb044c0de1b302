"""TensorBoard's writer, without TensorFlow, for which it looks: loading that takes seconds and half a gigabyte."""

import sys
from types import ModuleType

# The module by which TensorBoard is told to write files by itself: where there is one, it does not import TensorFlow.
_MARKER = "tensorboard.compat.notf"

_marked = _MARKER not in sys.modules
if _marked:
    sys.modules[_MARKER] = ModuleType(_MARKER)
try:
    from torch.utils.tensorboard import SummaryWriter
finally:
    if _marked:
        del sys.modules[_MARKER]

__all__ = ["SummaryWriter"]
