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

from collections.abc import Iterable, Sequence
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
    """The weight of an embedding that nothing but lookups uses, [rows, ...]."""

    name: str
    parameter: nn.Parameter

    @property
    def rows(self) -> int:
        return self.parameter.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.parameter[0].numel() * self.parameter.element_size()


def find_tables(model: nn.Module, *, smallest: int = 0) -> tuple[list[Table], dict[str, str]]:
    """The tables of a model with at least `smallest` bytes; and the others, by name, each with why it is none."""
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
    """The numbers of the rows that are not all zero, in order. A NaN is not zero."""
    flat = gradient.reshape(len(gradient), -1)
    # Two reductions of floats are several times as fast on a CPU as one of `any`, which makes bools first.
    return ((flat.amax(dim=1) != 0) | (flat.amin(dim=1) != 0)).nonzero().view(-1)


@dataclass(frozen=True, kw_only=True)
class _Own:
    """This rank's gradient of a table, and the rows that it touched."""

    table: Table
    gradient: Tensor
    rows: Tensor
    by_rank: Sequence[Tensor] = ()  # the rows that each rank touched


class RowExchange:
    """Averages the gradients of tables over a group of replicas, after backward."""

    def __init__(self, tables: Sequence[Table], group: dist.ProcessGroup) -> None:
        """Every rank of the group must call this with the same tables; their values become those of rank 0."""
        self.tables = tables
        self._group = group
        self._ranks = dist.get_world_size(group)
        # Within each host sums are taken first: only an all-reduce goes between hosts in one stream a host.
        self._in_hosts = isinstance(group, KernelGroup) and not isinstance(group, SharedMemoryGroup)
        for table in tables:
            dist.broadcast(table.parameter.detach(), group=group, group_src=0)

    def exchange(self) -> None:
        """Leave the mean over the ranks in each table's gradient; where no rank used one, it keeps none."""
        if not self.tables:
            return
        touched = [
            None if (gradient := table.parameter.grad) is None else touched_rows(gradient) for table in self.tables
        ]
        counts = self._gather_counts([_NO_GRADIENT if rows is None else len(rows) for rows in touched])
        whole: list[_Own] = []
        in_rows: list[tuple[_Own, list[int]]] = []
        for table, rows, of_ranks in zip(self.tables, touched, counts.t().tolist(), strict=True):
            if max(of_ranks) == _NO_GRADIENT:
                continue
            own = _own(table, rows)
            of_ranks = [max(0, count) for count in of_ranks]
            if self._may_pay(table, max(of_ranks)):
                in_rows.append((own, of_ranks))
            else:
                whole.append(own)
        own_rows: list[_Own] = []
        any_rows: list[tuple[_Own, Tensor]] = []
        for own in self._gather_numbers(in_rows):
            union = _union(own.by_rank, own.table.rows)
            way = self._way(own, len(union))
            if way == "all":
                whole.append(own)
            elif way == "own":
                own_rows.append(own)
            else:
                any_rows.append((own, union))
        self._sum_rows_of_any(any_rows)
        self._sum_own_rows(own_rows)
        self._sum_whole(whole)

    # The choice.

    def _may_pay(self, table: Table, most: int) -> bool:
        """Whether rows could be fewer bytes than all, where the ranks touched `most` at most."""
        return min(self._bytes_of_own(table, most), self._bytes_of_any(table, most, most)) < self._bytes_of_all(table)

    def _way(self, own: _Own, union: int) -> Literal["all", "own", "any"]:
        table, most = own.table, max(map(len, own.by_rank))
        costs = {"any": self._bytes_of_any(table, most, union), "all": self._bytes_of_all(table)}
        # Half precision is summed in float32 by an all-reduce, which rows that are added one by one are not.
        if not self._in_hosts and (self._ranks == 2 or own.gradient.element_size() >= 4):
            costs["own"] = self._bytes_of_own(table, most)
        best: Any = min(costs, key=lambda way: costs[way])
        return best

    def _bytes_of_all(self, table: Table) -> float:
        return 2 * (self._ranks - 1) / self._ranks * table.rows * table.row_bytes

    def _bytes_of_own(self, table: Table, most: int) -> float:
        return (self._ranks - 1) * most * (table.row_bytes + _NUMBER_BYTES)

    def _bytes_of_any(self, table: Table, most: int, union: int) -> float:
        numbers = (self._ranks - 1) * most * _NUMBER_BYTES
        return 2 * (self._ranks - 1) / self._ranks * union * table.row_bytes + numbers

    # The messages.

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one size."""
        everyone = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(everyone, mine, group=self._group)
        return everyone

    def _gather_counts(self, counts: Sequence[int]) -> Tensor:
        """[ranks, tables]: how many rows of each table a rank has touched."""
        device = self.tables[0].parameter.device
        return torch.stack(self._gather(torch.tensor(counts, dtype=torch.int64, device=device)))

    def _gather_numbers(self, tables: Sequence[tuple[_Own, list[int]]]) -> Iterable[_Own]:
        """The numbers of the rows that each rank touched, of all tables in one message."""
        if not tables:
            return
        places = [max(of_ranks) for _, of_ranks in tables]
        padded = [_padded(own.rows.to(torch.int32), place) for (own, _), place in zip(tables, places, strict=True)]
        everyone = [each.split(places) for each in self._gather(torch.cat(padded))]
        for number, (own, of_ranks) in enumerate(tables):
            by_rank = [
                theirs[number][:count].to(torch.int64) for theirs, count in zip(everyone, of_ranks, strict=True)
            ]
            yield _Own(table=own.table, gradient=own.gradient, rows=own.rows, by_rank=by_rank)

    def _sum_own_rows(self, tables: Sequence[_Own]) -> None:
        for some in _by_dtype(tables, lambda own: own):
            places = [max(map(len, own.by_rank)) * own.gradient[0].numel() for own in some]
            mine = [
                _padded(own.gradient[own.rows].mul_(1 / self._ranks).view(-1), place)
                for own, place in zip(some, places, strict=True)
            ]
            everyone = [each.split(places) for each in self._gather(torch.cat(mine))]
            for number, own in enumerate(some):
                own.gradient.index_fill_(0, own.rows, 0)
                for rows, theirs in zip(own.by_rank, everyone, strict=True):
                    shape = (len(rows), *own.gradient.shape[1:])
                    values = theirs[number][: len(rows) * own.gradient[0].numel()].view(shape)
                    # No row stands twice in one rank's, so this adds each once.
                    own.gradient.index_copy_(0, rows, own.gradient.index_select(0, rows).add_(values))

    def _sum_rows_of_any(self, tables: Sequence[tuple[_Own, Tensor]]) -> None:
        for some in _by_dtype(tables, lambda each: each[0]):
            values = [own.gradient.index_select(0, union).mul_(1 / self._ranks) for own, union in some]
            message = torch.cat([each.view(-1) for each in values])
            dist.all_reduce(message, group=self._group)
            parts = message.split([each.numel() for each in values])
            for (own, union), part, like in zip(some, parts, values, strict=True):
                own.gradient.index_copy_(0, union, part.view_as(like))

    def _sum_whole(self, tables: Sequence[_Own]) -> None:
        works: list[Any] = []
        for own in tables:
            # As DistributedDataParallel does: times 1 / n, then summed.
            works.append(dist.all_reduce(own.gradient.mul_(1 / self._ranks), group=self._group, async_op=True))
        for work in works:
            work.wait()


def _own(table: Table, rows: Tensor | None) -> _Own:
    """A gradient that can be written into, of zeros where only other ranks used the table."""
    parameter = table.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    if rows is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return _Own(table=table, gradient=parameter.grad, rows=rows)


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values))])


def _union(by_rank: Sequence[Tensor], rows: int) -> Tensor:
    """The numbers that any rank has, in order."""
    mask = torch.zeros(rows, dtype=torch.bool, device=by_rank[0].device)
    for numbers in by_rank:
        mask[numbers] = True
    return mask.nonzero().view(-1)


def _by_dtype(tables: Sequence[Any], own_of: Any) -> list[list[Any]]:
    kinds: dict[torch.dtype, list[Any]] = {}
    for each in tables:
        kinds.setdefault(own_of(each).gradient.dtype, []).append(each)
    return list(kinds.values())
