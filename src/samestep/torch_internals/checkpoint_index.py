"""Classes without a public name in the index of PyTorch's distributed checkpoints, which is a pickle.

Imports `torch.distributed.checkpoint`, which `import torch` doesn't.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

CLASSES = (_MEM_FORMAT_ENCODING, _StorageInfo)
# The function by which an index names a tensor's layout.
LAYOUT_FUNCTION = ("torch.serialization", "_get_layout")
