"""A rehearsal of a sliced model without messages, for slices of which one rank's alone may fail.

The other ranks would wait for a rank that fails before a message, until the watchdog ends them. So where slices are
of unlike sizes, every rank first runs the model by itself, and they agree on whether anyone has failed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_IN_PLACE = ("allreduce_", "broadcast_")  # which leave this rank's numbers where the sum or another rank's would be
_WITHOUT_TENSORS = ("alltoall_base_", "barrier")  # which give nothing but the work


class Unconnected(TorchDispatchMode):
    """Code in which collectives send nothing: what would come from other ranks is zero, of the right shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in _IN_PLACE:
            pytree.tree_map_only(Tensor, Tensor.zero_, args[0])
        work = FakeWork().boxed()
        return work if name in _WITHOUT_TENSORS else (args[0], work)
