"""Shared replicas: the ranks of a host keep one copy of the parameters, and each steps its part of them.

n plain replicas hold n times the parameters, the gradients, their sums' buckets and the optimizer's state. Here one
region, which all ranks map, holds the parameters once, [N], and behind them each rank's own gradients, n x [N]. A
rank sums and steps about N / n numbers: a run of rows, in the order of the model's parameters. So the optimizer's
state is there once as well, over all ranks (as in ZeRO-1, Rajbhandari et al. 2020), and nothing is copied to
exchange gradients or parameters: a rank reads the others' where they lie.

A step, and where each rank waits for all others:

    forward and backward    read parameters, write own gradients
    --- which parameters did any rank use?
    sum                     read the others' gradients of the own part, write their mean over the own ones
    --- the norm of the whole gradient
    update                  write the own part of the parameters
    --- a barrier

No rank writes a parameter before all have ended backward, nor reads one before all have written; and none writes
its gradients again before all have read them.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore

from samestep.comm.shared_memory import region
from samestep.comm.shared_memory.region import NoRegionError, host_identity, host_of_each
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.sharding import Part, ShardTable, Slice
from samestep.torch_internals import foreach
from samestep.torch_internals.groups import default_store

_ALIGNED = 64  # bytes: a tensor begins at a line of the cache
_CHUNK = 1 << 18  # bytes summed at a time, which stay in the second-level cache


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A contiguous run of a rank's part of the gradients, of one dtype, with zeros as padding between parameters."""

    first: int  # byte of a rank's gradients
    last: int
    dtype: torch.dtype


def share_out(sizes: Sequence[tuple[int, int]], ranks: int) -> list[list[tuple[int, int]]]:
    """Distribute rows over ranks: for each parameter the first row, and one past the last row, of each rank.

    `sizes`: (rows, elements in a row) of each parameter. Ranks get consecutive rows, with nearly equal elements.
    """
    total, before = sum(rows * row for rows, row in sizes), 0
    shares: list[list[tuple[int, int]]] = []
    for rows, row in sizes:
        # Rank r's part begins at element r * total / ranks, rounded to a row, which may be outside of this parameter.
        cuts = [round((rank * total / ranks - before) / max(1, row)) for rank in range(ranks + 1)]
        shares.append([*pairwise(min(rows, max(0, cut)) for cut in cuts)])
        before += rows * row
    return shares


class SharedReplicas:
    """A model's parameters in shared memory of a group's ranks, and this rank's rows of them."""

    def __init__(self, model: nn.Module, layout: Layout, parts: ShardTable, group: dist.ProcessGroup) -> None:
        """Move a model's parameters into a new region, with the values of rank 0. Every rank of the group asks.

        Raises LayoutError on every rank if the ranks are on several hosts or one would have no rows to step, and
        UserError if the memory can't be allocated.
        """
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        named = list(model.named_parameters())
        self._trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        offsets, parameter_bytes = _offsets([parameter for _, parameter in named])
        gradient_offsets, gradient_bytes = _offsets([parameter for _, parameter in self._trained])
        shares = share_out([_rows(parameter) for _, parameter in self._trained], self._ranks)
        if any(all(first == last for first, last in ranks) for ranks in zip(*shares, strict=True)):
            raise LayoutError(
                f'layout "{layout}": run.share_replicas is true, and the {len(self._trained)} trained parameters '
                "have not a row for each rank; use share_replicas: false"
            )
        memory = self._open(parameter_bytes + self._ranks * gradient_bytes, layout)
        # Region: [all parameters][gradients of rank 0] ... [gradients of rank n-1].
        blocks = memory[parameter_bytes:].view(self._ranks, gradient_bytes)
        self._gradients = blocks  # [ranks, bytes of all gradients]
        for (_, parameter), offset in zip(named, offsets, strict=True):
            shared = _tensor(memory, offset, parameter)
            if self._rank == 0:
                shared.copy_(parameter.detach())
            parameter.data = shared
        dist.barrier(group)
        self._used = [False] * len(self._trained)
        self._own: list[Tensor] = []
        for number, ((_, parameter), offset) in enumerate(zip(self._trained, gradient_offsets, strict=True)):
            self._own.append(_tensor(blocks[self._rank], offset, parameter))
            parameter.register_post_accumulate_grad_hook(self._keeps(number))
        own_shares = [ranks[self._rank] for ranks in shares]
        self._pieces = list(self._cut(own_shares))
        self._runs = _runs([parameter for _, parameter in self._trained], gradient_offsets, own_shares)
        held = {name: piece for _, name, piece in self._pieces}
        self.held: nn.Module = _Held(held)
        self.held_parts = _parts_of_rows(
            parts, group, held, dict(zip(held_names(self._trained), shares, strict=True))
        )
        first = self._rank == 0
        # Holdings of this rank: its rows of trained parameters; rank 0 also counts frozen ones.
        frozen = [parameter.detach() for _, parameter in named if first and not parameter.requires_grad]
        self.parameters = [*(piece.detach() for piece in held.values()), *frozen]
        self.gradients = self._own

    def _open(self, size: int, layout: Layout) -> Tensor:
        """Map a new region of this group as a tensor of bytes."""
        world = default_store()
        number = torch.zeros(1, dtype=torch.int64)
        if self._rank == 0:
            # A unique number for each group and model, so that the keys of two regions in the store don't collide.
            number += world.add("shared-replicas", 1)
        dist.broadcast(number, group=self._group, group_src=0)
        store = PrefixStore(f"shared-replicas-{number.item()}", world)
        hosts = host_of_each(store, self._rank, self._ranks, host_identity())
        if len(set(hosts)) > 1:
            raise LayoutError(
                f'layout "{layout}": run.share_replicas is true, and the ranks are on {len(set(hosts))} hosts, which '
                "share no memory; use share_replicas: false"
            )
        try:
            opened = region.share(store, self._rank, self._ranks, size)
        except NoRegionError as error:
            raise UserError(f"run.share_replicas is true, and {error}; use share_replicas: false") from None
        os.close(opened.file)  # the mapping stays valid until the last tensor in it is freed
        return torch.frombuffer(opened.memory, dtype=torch.uint8)

    def _keeps(self, number: int) -> Any:
        """Make a hook that moves an accumulated gradient into this rank's part of the region."""
        own = self._own[number]

        def keep(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.data_ptr() == own.data_ptr():
                return  # a later micro-batch's gradient was accumulated in place
            # Once a step: autograd allocates the first micro-batch's gradient, and accumulates the next in place.
            own.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = own
            self._used[number] = True

        return keep

    def _cut(self, own_shares: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str, nn.Parameter]]:
        """This rank's rows of each parameter, as parameters of its optimizer."""
        for number, ((name, parameter), (first, last)) in enumerate(zip(self._trained, own_shares, strict=True)):
            if first < last:
                rows = parameter.detach()[first:last] if parameter.ndim else parameter.detach()
                yield number, name, nn.Parameter(rows)

    # The step.

    def sum(self) -> None:
        """After backward: average this rank's rows of the gradients over the ranks; unused parameters get None."""
        for used, own in zip(self._used, self._own, strict=True):
            if not used:
                own.zero_()  # other ranks add it
        used = torch.tensor(self._used, dtype=torch.uint8)
        self._used = [False] * len(self._used)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        any_used = used.tolist()
        for run in self._runs:
            self._sum_run(run)
        for (_, parameter), own, is_used in zip(self._trained, self._own, any_used, strict=True):
            parameter.grad = own if is_used else None
        for number, _, piece in self._pieces:
            piece.grad = self._rows_of_gradient(number, piece) if any_used[number] else None

    def _rows_of_gradient(self, number: int, piece: nn.Parameter) -> Tensor:
        """The gradient of this rank's rows of a parameter, as a view of the region."""
        parameter, own = self._trained[number][1], self._own[number]
        skipped = piece.data_ptr() - parameter.data_ptr()  # bytes of rows before this rank's
        first = skipped // parameter.element_size()
        return own.view(-1)[first : first + piece.numel()].view(piece.shape)

    def _sum_run(self, run: _Run) -> None:
        """Average a run over the ranks, chunk by chunk, into this rank's gradients."""
        # 16-bit gradients are added in float32 and rounded once.
        wide = torch.float32 if run.dtype.itemsize < 4 else run.dtype
        for first in range(run.first, run.last, _CHUNK):
            last = min(run.last, first + _CHUNK)
            parts = [block[first:last].view(run.dtype) for block in self._gradients.unbind()]
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:  # in the order of the ranks, like the shared-memory kernel
                total += part
            parts[self._rank].copy_(total.mul_(1 / self._ranks))

    def norm(self) -> Tensor:
        """The norm of the whole gradient, over all ranks' parts."""
        squares = torch.zeros((), dtype=torch.float64)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, _, piece in self._pieces:
            if piece.grad is not None:
                by_dtype.setdefault(piece.dtype, []).append(piece.grad)
        for gradients in by_dtype.values():
            # In float64, as squares of all ranks' rows are summed.
            squares += torch.stack(foreach.norm(gradients)).double().square().sum()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()

    def wait(self) -> None:
        """Wait until every rank has written its rows."""
        dist.barrier(self._group)


def held_names(trained: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    return [name for name, _ in trained]


class _Held(nn.Module):
    """This rank's rows of the parameters, under the parameters' names."""

    def __init__(self, held: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._held = held

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._held.items()


def _parts_of_rows(
    parts: ShardTable,
    group: dist.ProcessGroup,
    held: dict[str, nn.Parameter],
    shares: dict[str, list[tuple[int, int]]],
) -> ShardTable:
    """The table for the optimizer's state, in which parameters are split into rows."""
    rows = {
        name: Part(slice=Slice(group=group, dim=0, ranges=[[share] for share in shares[name]]))
        for name, piece in held.items()
        if piece.ndim
    }
    return replace(parts, table={**parts.table, **rows})


def _rows(parameter: nn.Parameter) -> tuple[int, int]:
    """The number of rows of a parameter, and of elements in each; a scalar is one row."""
    return (len(parameter), parameter[:1].numel()) if parameter.ndim else (1, 1)


def _offsets(parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
    """The aligned offset of each tensor in bytes, and the total size."""
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += -(-parameter.nbytes // _ALIGNED) * _ALIGNED
    return offsets, end


def _tensor(memory: Tensor, offset: int, like: nn.Parameter) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _runs(
    parameters: Sequence[nn.Parameter], offsets: Sequence[int], own_shares: Sequence[tuple[int, int]]
) -> Sequence[_Run]:
    """This rank's rows of all gradients as byte ranges of a rank's gradients, adjacent ones joined."""
    runs: list[_Run] = []
    for parameter, offset, (first, last) in zip(parameters, offsets, own_shares, strict=True):
        if first == last:
            continue
        row = _rows(parameter)[1] * parameter.element_size()
        run = _Run(first=offset + first * row, last=offset + last * row, dtype=parameter.dtype)
        if runs and runs[-1].dtype == run.dtype and run.first - runs[-1].last < _ALIGNED:
            run = replace(run, first=runs.pop().first)
        runs.append(run)
    return runs
