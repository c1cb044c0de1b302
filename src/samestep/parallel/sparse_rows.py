"""Gradients of embeddings between replicas: the rows that a step touched, where that is fewer bytes than all of them.

A batch looks up some rows of an embedding, and the gradient of all others is zero. DistributedDataParallel sends the
zeros as well. Here the tables are taken out of it, and after backward their gradients are summed in one of three
ways, of which all ranks choose the same for each table in each step, by the bytes that a rank sends in a ring of n
ranks (Thakur et al. 2005, section 4) for rows of b bytes:

    all rows           all-reduce of the whole gradient, V rows        2 (n-1)/n V b
    own rows           all-gather of each rank's rows, at most m       (n-1) m (b + 4)
    rows of any rank   all-reduce of the rows that any touched, U      2 (n-1)/n U b + (n-1) m 4

The 4 bytes are a row's number. Rows that a rank gathers are added up in the order of the ranks, as the kernel of
shared memory does with whole gradients: so what comes out has the same bits. Over gloo the same holds for two ranks;
with more, gloo's order depends on where in a message a number stands, and sums differ by their rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.shared_memory.process_group import KernelGroup, SharedMemoryGroup

Choice = Literal["auto", "on", "off"]

# Smaller tables stay in DistributedDataParallel's buckets: the numbers of touched rows are messages of their own.
SMALLEST = 1 << 20  # bytes
_NUMBER_BYTES = 4
_NO_GRADIENT = -1


@dataclass(frozen=True, kw_only=True)
class Table:
    """The weight [rows, ...] of an embedding that is only used for lookups."""

    name: str
    parameter: nn.Parameter

    @property
    def rows(self) -> int:
        return self.parameter.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.parameter[0].numel() * self.parameter.element_size()


def find_tables(model: nn.Module, *, smallest: int = 0) -> tuple[list[Table], dict[str, str]]:
    """The tables of a model with at least `smallest` bytes, and other embeddings by name with the reason."""
    lookups: dict[nn.Parameter, str] = {}
    others: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not module.sparse and name == "weight":
                lookups.setdefault(parameter, full)
            else:
                others.setdefault(parameter, full)
    tables: list[Table] = []
    refused: dict[str, str] = {}
    for parameter, name in lookups.items():
        if parameter in others:
            refused[name] = f"it is tied to {others[parameter]}, whose gradient has every row"
        elif not parameter.requires_grad or isinstance(parameter, DTensor) or parameter.is_complex():
            refused[name] = "it is not trained, or is cut into shards, or is complex"
        elif parameter.numel() == 0 or parameter.nbytes < smallest:
            refused[name] = f"it has {parameter.nbytes} bytes, and from {smallest} on it pays"
        else:
            tables.append(Table(name=name, parameter=parameter))
    return tables, refused


def touched_rows(gradient: Tensor) -> Tensor:
    """The indices of rows that are not all zero, in order. NaN is not zero."""
    flat = gradient.reshape(len(gradient), -1)
    # On a CPU two float reductions are several times faster than `any`, which converts to bool first.
    return ((flat.amax(dim=1) != 0) | (flat.amin(dim=1) != 0)).nonzero().view(-1)


@dataclass(frozen=True, kw_only=True)
class _Touched:
    """The rows of a table that a rank touched."""

    count: int  # number of rows; _NO_GRADIENT if it has no gradient
    rows: Tensor  # their indices in order; only the first ones if they did not fit into the message


@dataclass(frozen=True, kw_only=True)
class _Own:
    """This rank's gradient of a table, and its touched rows."""

    table: Table
    gradient: Tensor
    rows: Tensor
    by_rank: Sequence[Tensor]  # the rows that each rank touched


class RowExchange:
    """Averages the gradients of tables over a group of replicas, after backward."""

    def __init__(self, tables: Sequence[Table], group: dist.ProcessGroup) -> None:
        """Broadcast rank 0's values of the tables. Every rank of the group must call this with the same tables."""
        self.tables = tables
        self._group = group
        self._ranks = dist.get_world_size(group)
        # On several hosts only all-reduce is hierarchical, with one stream for each host between them.
        self._in_hosts = isinstance(group, KernelGroup) and not isinstance(group, SharedMemoryGroup)
        self._room = [0] * len(tables)  # number of row indices of each table that fit into a step's first message
        for table in tables:
            dist.broadcast(table.parameter.detach(), group=group, group_src=0)

    def exchange(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Average each table's gradient over the ranks; tables that no rank used keep `grad=None`.

        `flags`: the same number on every rank. Returns which of them any rank has set; they are sent in the first
        message.

        Messages of a step, the same on every rank: one all-gather of counts and row numbers (a second one where a
        table touched more rows than there was room for), then those of the chosen way for each table. All ranks
        compute the choice from what they have gathered, so no message is needed to agree on it.
        """
        touched = [
            None if (gradient := table.parameter.grad) is None else touched_rows(gradient) for table in self.tables
        ]
        whole: list[_Own] = []
        own_rows: list[_Own] = []
        any_rows: list[tuple[_Own, Tensor]] = []
        of_tables, any_flags = self._touched_by_ranks(touched, flags)
        for table, rows, by_rank in zip(self.tables, touched, of_tables, strict=True):
            most = max(of_rank.count for of_rank in by_rank)
            if most == _NO_GRADIENT:
                continue
            own = _own(table, rows, [of_rank.rows for of_rank in by_rank])
            if not self._may_pay(table, most):
                whole.append(own)
                continue
            union = _union(own.by_rank, table.rows)
            way = self._way(table, most, len(union))
            if way == "all":
                whole.append(own)
            elif way == "own":
                own_rows.append(own)
            else:
                any_rows.append((own, union))
        # Three lots in one order, into which every rank has put the same tables: their messages match by order.
        self._sum_rows_of_any(any_rows)
        self._sum_own_rows(own_rows)
        self._sum_whole(whole)
        return any_flags

    # The choice.

    def _may_pay(self, table: Table, most: int) -> bool:
        """Whether sending rows could take fewer bytes than all rows, if ranks touched at most `most` rows."""
        return min(self._bytes_of_own(table, most), self._bytes_of_any(table, most, most)) < self._bytes_of_all(table)

    def _way(self, table: Table, most: int, union: int) -> Literal["all", "own", "any"]:
        """The way with the fewest bytes: all rows, own rows, or rows of any rank."""
        costs = {"any": self._bytes_of_any(table, most, union), "all": self._bytes_of_all(table)}
        # An all-reduce sums half precision in float32, but rows would be added one by one.
        if not self._in_hosts and (self._ranks == 2 or table.parameter.element_size() >= 4):
            costs["own"] = self._bytes_of_own(table, most)
        best: Any = min(costs, key=lambda way: costs[way])
        return best

    def _bytes_of_all(self, table: Table) -> float:
        """An all-reduce of V rows in a ring."""
        return 2 * (self._ranks - 1) / self._ranks * table.rows * table.row_bytes

    def _bytes_of_own(self, table: Table, most: int) -> float:
        """An all-gather of at most `most` rows a rank, with their numbers."""
        return (self._ranks - 1) * most * (table.row_bytes + _NUMBER_BYTES)

    def _bytes_of_any(self, table: Table, most: int, union: int) -> float:
        """An all-reduce of the rows that any rank touched, after an all-gather of their numbers."""
        numbers = (self._ranks - 1) * most * _NUMBER_BYTES
        return 2 * (self._ranks - 1) / self._ranks * union * table.row_bytes + numbers

    # The messages.

    def _gather(self, message: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one size."""
        everyone = [torch.empty_like(message) for _ in range(self._ranks)]
        dist.all_gather(everyone, message, group=self._group)
        return everyone

    def _touched_by_ranks(
        self, touched: Sequence[Tensor | None], flags: Sequence[bool]
    ) -> tuple[list[list[_Touched]], list[bool]]:
        """All-gather each rank's touched rows of each table, and the flags that any rank has set.

        One message has the counts and the row indices, with room for as many indices of each table as the last step
        needed, and an eighth more: sending the counts first would double the latency. Only the indices of tables that
        need more room are sent again.
        """
        touched_by_rank, any_flags = self._gather_touched(touched, self._room, flags)
        most = [max(of_rank.count for of_rank in by_rank) for by_rank in touched_by_rank]
        needed = [max(0, n) if self._may_pay(table, n) else 0 for table, n in zip(self.tables, most, strict=True)]
        short = [number for number, n in enumerate(needed) if n > self._room[number]]
        if short:
            again, _ = self._gather_touched(
                [touched[number] for number in short], [needed[number] for number in short]
            )
            for number, by_rank in zip(short, again, strict=True):
                touched_by_rank[number] = by_rank
        self._room = [n + n // 8 for n in needed]
        return touched_by_rank, any_flags

    def _gather_touched(
        self, touched: Sequence[Tensor | None], room: Sequence[int], flags: Sequence[bool] = ()
    ) -> tuple[list[list[_Touched]], list[bool]]:
        """All-gather touched rows of some tables, up to `room` indices each, and flags."""
        device = self.tables[0].parameter.device
        counts = [_NO_GRADIENT if indices is None else len(indices) for indices in touched]
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        rows = (nothing if indices is None else indices.to(torch.int32) for indices in touched)
        padded = [_padded(indices[:places], places) for indices, places in zip(rows, room, strict=True)]
        head = torch.tensor([*counts, *flags], dtype=torch.int32, device=device)
        by_table: list[list[_Touched]] = [[] for _ in touched]
        any_flags = [False] * len(flags)
        for message in self._gather(torch.cat([head, *padded])):
            theirs, *numbers = message.split([len(head), *room])
            of_rank = theirs.tolist()
            for by_rank, count, some in zip(by_table, of_rank, numbers, strict=False):  # flags follow the counts
                by_rank.append(_Touched(count=count, rows=some[: max(0, count)].to(torch.int64)))
            any_flags = [one or bool(other) for one, other in zip(any_flags, of_rank[len(counts) :], strict=True)]
        return by_table, any_flags

    def _sum_own_rows(self, tables: Sequence[_Own]) -> None:
        """Gather each rank's own rows [at most m, ...], and add them up in the order of the ranks.

        Sparse addition in one call (index_add_) would add rows of one number in an order that PyTorch doesn't
        promise.
        """
        for some in _by_dtype(tables, lambda own: own):
            places = [max(map(len, own.by_rank)) * own.gradient[0].numel() for own in some]
            own_rows = [
                _padded(own.gradient[own.rows].mul_(1 / self._ranks).view(-1), place)
                for own, place in zip(some, places, strict=True)
            ]
            everyone = [rows_of_rank.split(places) for rows_of_rank in self._gather(torch.cat(own_rows))]
            for number, own in enumerate(some):
                # Own rows come back among everyone's, so that all ranks add the same numbers in the same order.
                own.gradient.index_fill_(0, own.rows, 0)
                for rows, theirs in zip(own.by_rank, everyone, strict=True):
                    shape = (len(rows), *own.gradient.shape[1:])
                    values = theirs[number][: len(rows) * own.gradient[0].numel()].view(shape)
                    # No row stands twice in one rank's, so this adds each once.
                    own.gradient.index_copy_(0, rows, own.gradient.index_select(0, rows).add_(values))

    def _sum_rows_of_any(self, tables: Sequence[tuple[_Own, Tensor]]) -> None:
        """All-reduce the rows [union, ...] that any rank touched; a rank gives zeros for those that it didn't."""
        for some in _by_dtype(tables, lambda table: table[0]):
            # [union, ...] each
            values = [own.gradient.index_select(0, union).mul_(1 / self._ranks) for own, union in some]
            message = torch.cat([value.view(-1) for value in values])
            dist.all_reduce(message, group=self._group)
            parts = message.split([value.numel() for value in values])
            for (own, union), part, like in zip(some, parts, values, strict=True):
                own.gradient.index_copy_(0, union, part.view_as(like))

    def _sum_whole(self, tables: Sequence[_Own]) -> None:
        """One all-reduce of each table's whole gradient, where rows would not be fewer bytes."""
        works: list[Any] = []
        for own in tables:
            # As DistributedDataParallel does: times 1 / n, then summed.
            works.append(dist.all_reduce(own.gradient.mul_(1 / self._ranks), group=self._group, async_op=True))
        for work in works:
            work.wait()


def _own(table: Table, rows: Tensor | None, by_rank: Sequence[Tensor]) -> _Own:
    """This rank's gradient as a contiguous tensor, zero if only other ranks used the table."""
    parameter = table.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    if rows is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return _Own(table=table, gradient=parameter.grad, rows=rows, by_rank=by_rank)


def _padded(values: Tensor, length: int) -> Tensor:
    """Pad with zeros to a length, as all-gather needs equal sizes."""
    return torch.cat([values, values.new_zeros(length - len(values))])


def _union(by_rank: Sequence[Tensor], rows: int) -> Tensor:
    """The sorted union of the ranks' row indices."""
    mask = torch.zeros(rows, dtype=torch.bool, device=by_rank[0].device)
    for numbers in by_rank:
        mask[numbers] = True
    return mask.nonzero().view(-1)


def _by_dtype(tables: Sequence[Any], own_of: Any) -> list[list[Any]]:
    kinds: dict[torch.dtype, list[Any]] = {}
    for table in tables:
        kinds.setdefault(own_of(table).gradient.dtype, []).append(table)
    return list(kinds.values())
