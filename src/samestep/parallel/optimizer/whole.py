"""Optimizers that need whole parameters, on sharded ones: Muon's matrices, Adafactor's means, LAMB's norms.

Where a layout slices or shards parameters, each parameter has an owner among the ranks that hold its parts. In a step

    gather    every rank sends its parts of a parameter and of its gradient to the owner
    step      the owner steps the whole parameter
    scatter   the owner sends the stepped parts back to all ranks that hold them

each of which is one all-to-all message of many parameters. Owners are shared out so that every rank of a group owns
about as many numbers, so the state, which only owners keep, is sharded, and no rank steps what another steps: the
work is divided too (as in distributed Muon, Liu et al. 2025, arXiv 2502.16982, algorithm 1). Whole parameters and
gradients exist for the time of one message alone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.mesh import Mesh
from samestep.comm.messages import largest
from samestep.parallel.optimizer.joined import follow
from samestep.parallel.optimizer.kinds import Make
from samestep.parallel.sharding import Placed, ShardTable, local, places_of

_AXES = ("shard", "expert", "tensor")  # along which ranks hold different parts, or share out the owners

# Numbers of whole parameters that a rank has at a time, unless one alone has more.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class _Holding:
    """The boxes of a parameter that one rank of the group holds."""

    shape: torch.Size  # of the whole
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # offsets and sizes in the whole


@dataclass(frozen=True, kw_only=True)
class _Mine:
    """A parameter that this rank holds parts of."""

    parameter: nn.Parameter
    places: Sequence[Placed]
    group: int  # number of its group


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """A parameter, its owner, and the ranks that hold its boxes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    owner: int
    senders: Mapping[int, Sequence[int]]  # rank -> indices of the boxes that it sends to the owner
    holders: Mapping[int, _Holding]


class WholeOptimizer(Optimizer):
    """Steps whole parameters on their owners. Its groups hold this rank's parts, and a schedule sets their rates."""

    def __init__(
        self, optimizer: Optimizer | None, make: Make, *, names: Mapping[Tensor, str], parts: ShardTable, host: bool
    ) -> None:
        """`optimizer`: of this rank's parts, None without any; every rank of the group must construct this.

        `names`: of its parameters in the whole model. `host`: whether whole parameters and state are in host memory.
        """
        super().__init__([{"params": []}], {})
        self.param_groups = [] if optimizer is None else optimizer.param_groups
        mesh = parts.mesh
        self._group = mesh.group(*_AXES)
        self._rank = dist.get_rank(self._group)
        self._device = torch.device(mesh.grid.device_type)
        self._host = host
        self._mine: dict[str, _Mine] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                name = names[parameter]
                places = places_of(parameter, parts.part(name), parts.parameters[name].shape)
                self._mine[name] = _Mine(parameter=parameter, places=places, group=number)
        self._wholes = self._gather_shapes(parts, mesh)
        size = dist.get_world_size(self._group)
        self._rounds = [_Round(self, some, make) for some in _in_rounds(self._wholes, size)]

    def _gather_shapes(self, parts: ShardTable, mesh: Mesh) -> list[_Whole]:
        """All-gather the ranks' boxes, and assign an owner to each parameter; the same on every rank."""
        held = {
            name: _Holding(
                shape=parts.parameters[name].shape,
                dtype=part.parameter.dtype,
                boxes=tuple((place.offsets, place.sizes) for place in part.places),
            )
            for name, part in self._mine.items()
        }
        of_ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(of_ranks, (mesh.coordinate("shard"), held), group=self._group)
        shards = [shard for shard, _ in of_ranks]
        holders: dict[str, dict[int, _Holding]] = {}
        for name in parts.parameters:
            here = {rank: theirs[name] for rank, (_, theirs) in enumerate(of_ranks) if name in theirs}
            if here:
                holders[name] = here
        loads = [0] * len(of_ranks)  # number of elements that each rank owns so far
        wholes = []
        for name, here in sorted(holders.items(), key=lambda item: -next(iter(item[1].values())).shape.numel()):
            first = next(iter(here.values()))
            # Greedy balancing, the same on all ranks: the largest parameters first, each to the least loaded rank
            # among those that hold a part of it, as others may not have its settings.
            owner = min(here, key=lambda rank: (loads[rank], rank))
            loads[owner] += first.shape.numel()
            senders = _senders(here, owner, shards)
            wholes.append(
                _Whole(name=name, shape=first.shape, dtype=first.dtype, owner=owner, senders=senders, holders=here)
            )
        return wholes

    def owned(self) -> Iterator[tuple[Optimizer, dict[Tensor, str]]]:
        """Yield the inner optimizers of the parameters that this rank owns, with the parameters' names."""
        for part in self._rounds:
            if part.inner is not None:
                yield part.inner, part.names

    def stepped_along(self, axis_rank: int, mesh: Mesh) -> list[nn.Parameter]:
        """The parameters of this rank whose owner is at a position of the shard axis."""
        shards: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(shards, mesh.coordinate("shard"), group=self._group)
        return [
            self._mine[whole.name].parameter
            for part in self._rounds
            for whole in part.wholes
            if whole.name in self._mine and shards[whole.owner] == axis_rank
        ]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run all rounds, in the same order on every rank of the group."""
        used = self._used_by_any()
        for part in self._rounds:
            part.step(used)

    def _used_by_any(self) -> set[str]:
        """The parameters of which any rank has a gradient; the optimizer skips the others."""
        has_gradient = {name: part.parameter.grad is not None for name, part in self._mine.items()}
        used = largest(
            [has_gradient.get(whole.name, False) for whole in self._wholes], self._group, self._device.type
        )
        return {whole.name for whole, by_any in zip(self._wholes, used, strict=True) if by_any}


class _Round:
    """Parameters that are gathered, stepped and scattered together."""

    def __init__(self, optimizer: WholeOptimizer, wholes: Sequence[_Whole], make: Make) -> None:
        self.wholes = wholes
        self._of = optimizer
        self._ranks = range(dist.get_world_size(optimizer._group))
        memory = torch.device("cpu") if optimizer._host else optimizer._device
        self._owned: dict[str, nn.Parameter] = {}
        groups: dict[int, list[nn.Parameter]] = {}
        for whole in wholes:
            if whole.owner == optimizer._rank:
                # Zeros, while the optimizer is constructed; `step` fills in the values.
                owned = nn.Parameter(torch.zeros(whole.shape, dtype=whole.dtype, device=memory))
                self._owned[whole.name] = owned
                groups.setdefault(optimizer._mine[whole.name].group, []).append(owned)
        self.names: dict[Tensor, str] = {owned: name for name, owned in self._owned.items()}
        self._numbers = list(groups)
        self.inner: Optimizer | None = None
        if groups:
            settings = optimizer.param_groups
            self.inner = make([{**settings[number], "params": owned} for number, owned in groups.items()])
        self._forget()

    def step(self, used: Collection[str]) -> None:
        """Gather, step and scatter the parameters of this round, in one pair of messages for each dtype.

        `used`: the parameters that have a gradient on any rank.
        """
        dtypes = dict.fromkeys(whole.dtype for whole in self.wholes)
        for dtype in dtypes:
            self._gather([whole for whole in self.wholes if whole.dtype == dtype], dtype, used)
        if self.inner is not None:
            follow(self.inner, self._of.param_groups, self._numbers)
            self.inner.step()
        for dtype in dtypes:
            self._scatter([whole for whole in self.wholes if whole.dtype == dtype], dtype)
        self._forget()

    def _forget(self) -> None:
        """Free whole parameters and gradients after a step; owners only keep the state."""
        for owned in self._owned.values():
            owned.grad = None
            # The parameter object is kept, since it is the key of the optimizer's state.
            owned.data = torch.empty(0, dtype=owned.dtype, device=owned.device)

    def _gather(self, wholes: Sequence[_Whole], dtype: torch.dtype, used: Collection[str]) -> None:
        """Send the boxes of gradients and parameters to the owners, in one all-to-all."""
        optimizer = self._of
        to_owners: list[list[Tensor]] = []
        for owner in self._ranks:
            parts: list[Tensor] = []
            for whole in wholes:
                if whole.owner == owner and optimizer._rank in whole.senders:
                    # In the order of `wholes`, in which owners read them.
                    parts += self._sent(whole, whole.senders[optimizer._rank])
            to_owners.append(parts)
        sizes = [
            sum(
                2 * _numbers(whole.holders[rank], whole.senders[rank])
                for whole in wholes
                if whole.owner == optimizer._rank and rank in whole.senders
            )
            for rank in self._ranks
        ]
        for rank, taken in enumerate(self._exchanged(to_owners, sizes, dtype)):
            start = 0
            for whole in wholes:
                if whole.owner != optimizer._rank or rank not in whole.senders:
                    continue
                start = self._put_whole(whole, rank, taken, start, used=whole.name in used)

    def _sent(self, whole: _Whole, boxes: Sequence[int]) -> list[Tensor]:
        """Flatten this rank's boxes of a parameter: the gradient of each box, then the values of each box."""
        part = self._of._mine[whole.name]
        parameter = local(part.parameter.detach())
        gradient = None if part.parameter.grad is None else local(part.parameter.grad)
        values = [parameter[part.places[number].memory] for number in boxes]
        if gradient is None:
            gradients = [torch.zeros_like(value) for value in values]
        else:
            gradients = [gradient[part.places[number].memory].to(parameter.dtype) for number in boxes]
        return [tensor.reshape(-1) for tensor in (*gradients, *values)]

    def _put_whole(self, whole: _Whole, rank: int, taken: Tensor, start: int, *, used: bool) -> int:
        """Copy a rank's boxes into the whole parameter and gradient; returns the end of them in `taken`."""
        owned = self._owned[whole.name]
        if owned.numel() != whole.shape.numel():
            owned.data = torch.zeros(whole.shape, dtype=whole.dtype, device=owned.device)
        if owned.grad is None and used:
            owned.grad = torch.zeros_like(owned)
        # If no rank has a gradient, the zeros that they send are ignored, and the optimizer skips the parameter.
        for target in (owned.grad, owned.data):
            for number in whole.senders[rank]:
                offsets, sizes = whole.holders[rank].boxes[number]
                count = torch.Size(sizes).numel()
                if target is not None:
                    target[_slices(offsets, sizes)] = taken[start : start + count].view(sizes)
                start += count
        return start

    def _scatter(self, wholes: Sequence[_Whole], dtype: torch.dtype) -> None:
        """Send each rank its boxes from the owners, in one all-to-all, and write them into the parameters."""
        optimizer = self._of
        to_holders: list[list[Tensor]] = []
        for rank in self._ranks:
            parts = []
            for whole in wholes:
                if whole.owner == optimizer._rank and rank in whole.holders:
                    stepped = self._owned[whole.name].detach()
                    parts += [stepped[_slices(*box)].reshape(-1) for box in whole.holders[rank].boxes]
            to_holders.append(parts)
        held_here = [whole for whole in wholes if whole.name in optimizer._mine]
        sizes = [
            sum(_numbers(whole.holders[optimizer._rank]) for whole in held_here if whole.owner == owner)
            for owner in self._ranks
        ]
        for owner, taken in enumerate(self._exchanged(to_holders, sizes, dtype)):
            start = 0
            for whole in held_here:
                if whole.owner != owner:
                    continue
                held = optimizer._mine[whole.name]
                parameter = local(held.parameter.detach())
                for place in held.places:
                    count = torch.Size(place.sizes).numel()
                    parameter[place.memory] = taken[start : start + count].view(place.sizes).to(parameter.device)
                    start += count

    def _exchanged(
        self, for_ranks: Sequence[Sequence[Tensor]], sizes: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]:
        """All-to-all flat tensors; `for_ranks`: for each rank. Returns those from each rank."""
        device = self._of._device
        message = torch.cat(
            [*(part.to(device) for parts in for_ranks for part in parts), torch.empty(0, dtype=dtype, device=device)]
        )
        taken = torch.empty(sum(sizes), dtype=dtype, device=device)
        sizes_for_ranks = [sum(part.numel() for part in parts) for parts in for_ranks]
        factor = 1
        if dtype.is_complex:  # back ends send real numbers
            message, there, factor = torch.view_as_real(message).reshape(-1), torch.view_as_real(taken).view(-1), 2
        else:
            there = taken
        dist.all_to_all_single(
            there,
            message,
            output_split_sizes=[factor * size for size in sizes],
            input_split_sizes=[factor * size for size in sizes_for_ranks],
            group=self._of._group,
        )
        return [*taken.split(list(sizes))]


def _senders(holders: Mapping[int, _Holding], owner: int, shards: Sequence[int]) -> dict[int, list[int]]:
    """Choose the ranks that send boxes, so that each distinct box is sent once.

    Ranks at the owner's position of the shard axis come first, since under ZeRO-1 only they have the gradient.
    """
    senders: dict[int, list[int]] = {}
    seen: set[Any] = set()
    for rank in sorted(holders, key=lambda rank: (rank != owner, shards[rank] != shards[owner], rank)):
        for number, box in enumerate(holders[rank].boxes):
            if box not in seen:
                seen.add(box)
                senders.setdefault(rank, []).append(number)
    return dict(sorted(senders.items()))


def _in_rounds(wholes: Sequence[_Whole], ranks: int) -> list[list[_Whole]]:
    """Split parameters into rounds of limited size."""
    rounds: list[list[_Whole]] = []
    room = 0
    for whole in wholes:
        if whole.shape.numel() > room:
            rounds.append([])
            room = _AT_ONCE * ranks
        rounds[-1].append(whole)
        room -= whole.shape.numel()
    return rounds


def _numbers(holding: _Holding, boxes: Sequence[int] | None = None) -> int:
    """The number of elements of some boxes, or of all."""
    chosen = range(len(holding.boxes)) if boxes is None else boxes
    return sum(torch.Size(holding.boxes[number][1]).numel() for number in chosen)


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))


class LocalOptimizer(Optimizer):
    """Steps this rank's shards as plain tensors, with an elementwise optimizer.

    So the optimizer's custom operators need not support DTensor.
    """

    def __init__(self, optimizer: Optimizer, make: Make) -> None:
        """`optimizer`: of sharded parameters; the groups are shared with it, so that a schedule sets both."""
        super().__init__([{"params": []}], {})
        self.param_groups = optimizer.param_groups
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (sharded parameter, local shard)
        groups = []
        for number, group in enumerate(self.param_groups):
            held = []
            for parameter in group["params"]:
                if local(parameter.detach()).numel():
                    shard = nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
                    self._pairs.append((parameter, shard))
                    held.append(shard)
            if held:
                groups.append((number, {**group, "params": held}))
        self._numbers = [number for number, _ in groups]
        self.inner = make([group for _, group in groups]) if groups else None

    def stepped(self) -> dict[Tensor, nn.Parameter]:
        """Local shard that the inner optimizer steps -> sharded parameter."""
        return {shard: parameter for parameter, shard in self._pairs}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the local shards, which share memory with the DTensors."""
        if self.inner is None:
            return
        follow(self.inner, self.param_groups, self._numbers)
        for parameter, shard in self._pairs:
            shard.data = local(parameter.detach())
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        self.inner.step()
        for _, shard in self._pairs:
            shard.grad = None
