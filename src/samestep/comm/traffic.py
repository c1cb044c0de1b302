"""Traffic: the bytes that a rank sends while a block of code runs, by kind of collective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch.distributed as dist
from torch import Tensor

from samestep.comm.collectives import all_but_own
from samestep.comm.observer import Observer
from samestep.comm.shared_memory.process_group import KernelGroup
from samestep.torch_internals import pytree
from samestep.torch_internals.groups import all_groups, group_named
from samestep.torch_internals.operators import arguments_by_name, schema

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "broadcast",
    "point-to-point",
    "all-to-all",
    "reduce",
    "gather",
    "scatter",
)


class Traffic(Observer):
    """Counts what this rank sends, by the formulas of ring algorithms.

    With n ranks, a rank sends 2(n-1)/n of an all-reduce's message, (n-1)/n of the whole of an all-gather, a
    reduce-scatter or an all-to-all, and all of a point-to-point message (Thakur et al. 2005, section 4). Where
    one rank gives or takes (broadcast, reduce, gather, scatter), all that is sent is shared out over the ranks
    evenly. What a back end puts on the wire may be more: headers, and other algorithms for short messages.

    Every message of PyTorch passes its dispatcher, also those that DistributedDataParallel sends from C++ while
    backward runs; there this mode sees them. Nothing is counted in other threads than the caller's and autograd's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = dict.fromkeys(KINDS, 0.0)  # bytes
        self.calls: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._in_operator = False  # a collective within an operator is already counted as the operator
        self._groups: list[KernelGroup] = []

    def __enter__(self) -> Self:
        every = all_groups() if dist.is_initialized() else ()
        self._groups = [group for group in every if isinstance(group, KernelGroup)]
        for group in self._groups:
            group.counters.append(self._count_direct)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for group in self._groups:
            group.counters.remove(self._count_direct)
        super().__exit__(*exception)

    def _count_direct(self, kind: str, message: int, ranks: int) -> None:
        """Count a collective of samestep's own groups, which Python and DDP call without the dispatcher."""
        if kind in _DIRECT and not self._in_operator:
            self._add(kind, _DIRECT[kind].sent(message, ranks))

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace in _NAMESPACES:
            self._count(func, schema(func).name.partition("::")[2], args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outermost, self._in_operator = self._in_operator, True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._in_operator = outermost

    def _count(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count one operator of PyTorch's, by its arguments' bytes and its group's size."""
        collective = _COLLECTIVES.get(name.removesuffix("_out").strip("_"))
        if collective is None:
            return  # a wait, a barrier, a receive
        arguments = arguments_by_name(func, args, kwargs)
        n = _group_size(arguments)
        self._add(collective.kind, collective.sent(collective.message(arguments, n), n))

    def _add(self, kind: str, bytes_sent: float) -> None:
        if bytes_sent:
            self.sent[kind] += bytes_sent
            self.calls[kind] += 1


_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})

Given = Mapping[str, Any]  # an operator's arguments by their names


@dataclass(frozen=True, kw_only=True)
class _Collective:
    """How the bytes of a kind of collective follow from its operator's arguments."""

    kind: str
    message: Callable[[Given, int], float]  # bytes of the whole message, from the arguments and the group's size
    sent: Callable[[float, int], float]  # bytes that one rank sends of it


def group_of(arguments: Given) -> dist.ProcessGroup:
    """The group that an operator's message is of."""
    if "process_group" in arguments:
        return cast(dist.ProcessGroup, dist.ProcessGroup.unbox(arguments["process_group"]))
    return group_named(arguments["group_name"])


def _group_size(arguments: Given) -> int:
    if isinstance(arguments.get("group_size"), int):
        return arguments["group_size"]
    return group_of(arguments).size()


def _twice_all_but_own(message: float, n: int) -> float:
    return all_but_own(n, 2 * message)


def _all_but_own(message: float, n: int) -> float:
    return all_but_own(n, message)


def _everything(message: float, n: int) -> float:
    return message


def _nbytes(nest: Any) -> float:
    return float(sum(leaf.nbytes for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)))


def _given_whole(arguments: Given, n: int) -> float:
    """Bytes of the message, of which a rank's input is the whole."""
    return _nbytes([arguments.get(name) for name in _INPUTS])


def _given_part(arguments: Given, n: int) -> float:
    """Bytes of the message, of which a rank's input is one of n parts."""
    return n * _given_whole(arguments, n)


def _taken_part(arguments: Given, n: int) -> float:
    """Bytes of a rank's output, as only the root has an input."""
    return _nbytes(arguments["output_tensors"])


def _sends_of_batch(arguments: Given, n: int) -> float:
    """Bytes of the sends in a batch of point-to-point operations."""
    pairs = zip(arguments["op_list"], arguments["tensors"], strict=True)
    return _nbytes([tensor for operator, tensor in pairs if operator == "isend"])


# PyTorch's names of the input arguments.
_INPUTS = ("tensor", "tensors", "input", "inputs", "input_list", "input_tensor", "input_tensors")

_ALL_REDUCE = _Collective(kind="all-reduce", message=_given_whole, sent=_twice_all_but_own)
_ALL_GATHER = _Collective(kind="all-gather", message=_given_part, sent=_all_but_own)
_REDUCE_SCATTER = _Collective(kind="reduce-scatter", message=_given_whole, sent=_all_but_own)
_BROADCAST = _Collective(kind="broadcast", message=_given_whole, sent=_all_but_own)
_REDUCE = _Collective(kind="reduce", message=_given_whole, sent=_all_but_own)
_SEND = _Collective(kind="point-to-point", message=_given_whole, sent=_everything)
_ALL_TO_ALL = _Collective(kind="all-to-all", message=_given_whole, sent=_all_but_own)

# What a group of our own does by itself.
_DIRECT = {
    collective.kind: collective for collective in (_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BROADCAST, _REDUCE)
}

# By the operator's name, without the underscores around it that say that it writes in place.
_COLLECTIVES: Mapping[str, _Collective] = {
    "allreduce": _ALL_REDUCE,
    "allreduce_coalesced": _ALL_REDUCE,
    "all_reduce": _ALL_REDUCE,
    "all_reduce_coalesced": _ALL_REDUCE,
    "allgather": _ALL_GATHER,
    "allgather_base": _ALL_GATHER,
    "allgather_coalesced": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "all_gather_into_tensor": _ALL_GATHER,
    "all_gather_into_tensor_coalesced": _ALL_GATHER,
    "reduce_scatter": _REDUCE_SCATTER,
    "reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_tensor": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "broadcast": _BROADCAST,
    "send": _SEND,
    "isend": _SEND,
    "batch_p2p_ops": _Collective(kind="point-to-point", message=_sends_of_batch, sent=_everything),
    "alltoall": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "shard_dim_alltoall": _ALL_TO_ALL,
    "reduce": _REDUCE,
    "gather": _Collective(kind="gather", message=_given_whole, sent=_all_but_own),
    "scatter": _Collective(kind="scatter", message=_taken_part, sent=_all_but_own),
}
