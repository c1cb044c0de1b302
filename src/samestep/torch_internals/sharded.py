"""What PyTorch's sharded models and optimizers know of their parts: DTensor, FSDP 1 and 2, DDP and ZeRO.

Imports DTensor, which `import torch` doesn't.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parallel import DistributedDataParallel

# Older names, under which the prover alone, which takes torch 2.4, meets them.
try:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # before 2.5
    from torch.distributed._tensor import DTensor
    from torch.distributed._tensor._utils import (  # pyright: ignore[reportMissingImports]
        compute_local_shape_and_global_offset,
    )
    from torch.distributed._tensor.placement_types import Partial
try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import FSDPModule

# AsyncCollectiveTensor: the result of a functional collective, which waits when it is used.
__all__ = ["AsyncCollectiveTensor", "DTensor", "FSDPModule", "Partial"]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without autograd and without waiting for messages; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def offset_of(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole of a DTensor, by dimension."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(int(start) for start in offset)


def shard_counts(module: FSDPModule) -> list[int]:
    """Over how many ranks FSDP2 shards each group of a module's parameters."""
    state: Any = module._get_fsdp_state()
    # Before 2.10 there was one group, or none.
    groups = getattr(state, "_fsdp_param_groups", None) or [group for group in [state._fsdp_param_group] if group]
    return [group.mesh_info.mesh.size() for group in groups]


@dataclass(frozen=True, kw_only=True)
class FlatPart:
    """One parameter in a flat parameter of FSDP1, and the stretch of it that this rank's shard holds."""

    name: str  # within the module that has the flat parameter
    shape: tuple[int, ...]  # of the whole
    start: int = 0  # in the flattened parameter
    count: int = 0
    place: int = 0  # in this rank's shard


def flat_handle(module: nn.Module) -> Any | None:
    """FSDP1's handle of a module's flat parameter, which is its `flat_param`; None for a module without one."""
    return getattr(module, "_handle", None)


def flat_parts(flat: Any) -> list[FlatPart]:
    """The parameters in a flat parameter of FSDP1, in their order."""
    parts: list[FlatPart] = []
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        held: dict[str, int] = {}
        if info.in_shard:
            held = {
                "start": int(info.intra_param_start_idx),
                "count": int(info.numel_in_shard),
                "place": int(info.offset_in_shard),
            }
        parts.append(FlatPart(name=name, shape=tuple(shape), **held))
    return parts


def unflattened(flat: Any) -> Sequence[nn.Parameter]:
    """The parameters as the model names them, under `use_orig_params`, in the order of `flat_parts`; else none."""
    return flat._params or ()


@contextmanager
def left_out_of_ddp(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context in which a DistributedDataParallel may be made of a module without the parameters of these names.

    PyTorch has no public way: a class method leaves an attribute on the module, which only the constructor reads.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    try:
        yield
    finally:  # the module may be wrapped again
        del module._ddp_params_and_buffers_to_ignore


def owned_by_ranks(optimizer: Any) -> list[list[nn.Parameter]]:
    """The parameters that each rank of a ZeroRedundancyOptimizer steps."""
    return [
        [parameter for group in groups for parameter in group["params"]]
        for groups in optimizer._partition_parameters()
    ]


def zero_optimizer(broadcast: Callable[[list[list[nn.Parameter]], dist.ProcessGroup], None]) -> Any:
    """Make a subclass of ZeroRedundancyOptimizer that hands on updated parameters by a function of one's own.

    PyTorch's class sends each parameter by itself, or keeps all as views of buckets, which asks for a single dtype.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, from what it imports along
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharded(ZeroRedundancyOptimizer):
        def _verify_same_dense_param_type(self) -> None:
            """Accept several dtypes, which the base class refuses."""

        def _sync_params(self) -> None:
            broadcast(owned_by_ranks(self), self.process_group)

    return Sharded
