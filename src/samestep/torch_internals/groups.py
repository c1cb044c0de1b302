"""The registry of process groups, their back ends and their counters."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FakeWork"]  # the handle of a collective that is over


def all_groups() -> tuple[dist.ProcessGroup, ...]:
    """All process groups of this rank, in the order in which they were made."""
    return tuple(distributed_c10d._world.pg_map)


def members_of_groups() -> Mapping[Any, Mapping[int, int]]:
    """The rank in the group of each member's rank in the world, by group; also of groups that this rank isn't in."""
    return distributed_c10d._world.pg_group_ranks


def default_store() -> dist.Store:
    """The store through which the ranks of the world met, for keys of one's own."""
    return distributed_c10d._get_default_store()


def group_named(name: str) -> dist.ProcessGroup:
    """The group of a name, as functional collectives carry it."""
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportReturnType, reportArgumentType]


def sequence_number(group: Any) -> int:
    """How many collectives this rank has entered in a group; RuntimeError from back ends that don't count.

    Callable from any thread, also while the group's collective hangs.
    """
    return group._get_sequence_number_for_group()


def count_collectives(gloo: Any) -> None:
    """Let a back end count its collectives, as `init_process_group` does for those that it makes.

    From PyTorch 2.14 on every back end counts, and the call only warns.
    """
    if torch.__version__ < "2.14":  # TorchVersion compares as versions, not as text
        gloo._set_sequence_number_for_group()


def answer_for_cpu(group: Any, gloo: Any) -> None:
    """Make gloo the back end of a bare process group, for tensors in host memory."""
    kind: Any = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)


def backend_for_cpu(group: Any) -> Any:
    """A group's back end for tensors in host memory; RuntimeError if it has none."""
    return group._get_backend(torch.device("cpu"))


def serves(group: Any, device: torch.device) -> bool:
    """Whether a group has a back end for tensors on a device."""
    return device in group._device_types


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one axis out of one of several, which its root keeps under a name; a collective."""
    return mesh._flatten(name)


class PythonGroup(dist.ProcessGroup):
    """A process group whose collectives are methods in Python, which PyTorch looks up by name.

    Those that PyTorch knows by private names, here or in older versions, are calls of public ones.
    """

    def entered_collectives(self) -> int:
        """How many collectives this rank has entered."""
        raise NotImplementedError

    def _get_sequence_number_for_group(self) -> int:
        return self.entered_collectives()

    # Before PyTorch 2.13.

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)  # pyright: ignore[reportAttributeAccessIssue]

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:  # noqa: N803
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)  # pyright: ignore[reportAttributeAccessIssue]


def all_gather_single(group: Any, output: Tensor, input: Tensor, opts: Any) -> Any:
    """Gather one tensor of each rank into one of all; before PyTorch 2.13 its name was private."""
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    return gather(output, input, opts)


def reduce_scatter_single(group: Any, output: Tensor, input: Tensor, opts: Any) -> Any:
    """Sum one tensor over the ranks, and keep a part of it; before PyTorch 2.13 its name was private."""
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return scatter(output, input, opts)
