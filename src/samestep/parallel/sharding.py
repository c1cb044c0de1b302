"""ShardTable: which part of each of the whole model's parameters a rank holds.

For a parameter W [out, in] of the whole model, a rank may hold

    all of it                         Part()
    a slice over the tensor axis      Part(slice=Slice(dim=0, ranges=...))      rows [first:last, :] of W
    a shard of that slice             the tensor is a DTensor of FSDP2          rows of the slice
    nothing                           Part(stages=...) or Part(holder=...) of other ranks

and its gradient after backward may be whole, a shard, or a part of a sum over further groups (`sum_over`). Names are
those of the whole model under every layout, which is what lets a checkpoint of one layout be read by another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.mesh import Mesh
from samestep.comm.messages import all_gather_uneven, largest
from samestep.layout import Layout
from samestep.parallel.zero1 import Owners, buckets
from samestep.torch_internals import foreach

Range = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A parameter sliced along one dimension over a group of ranks, each of which holds some ranges of it."""

    group: dist.ProcessGroup
    dim: int
    ranges: Sequence[Sequence[Range]]  # of each rank of the group; together they cover the dimension
    axis: str = "tensor"  # the mesh axis of the group

    @property
    def mine(self) -> Sequence[Range]:
        """The ranges that this rank holds."""
        return self.ranges[dist.get_rank(self.group)]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last in self.mine], self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """Gather the whole tensor from the ranks' parts; every rank of the group must ask."""
        lengths = [sum(last - first for first, last in ranges) for ranges in self.ranges]
        gathered = all_gather_uneven(part, self.group, lengths, self.dim)  # in the order of ranks
        whole = torch.empty_like(gathered)
        for theirs, ranges in zip(gathered.split(lengths, self.dim), self.ranges, strict=True):
            start = 0
            for first, last in ranges:
                whole.narrow(self.dim, first, last - first).copy_(theirs.narrow(self.dim, start, last - first))
                start += last - first
        return whole


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a parameter or buffer of the whole model that this rank holds."""

    slice: Slice | None = None  # None: all of it
    sum_over: tuple[dist.ProcessGroup, ...] = ()  # groups over which backward leaves its gradient in parts
    stages: tuple[int, ...] | None = None  # pipeline ranks that hold it; None: all
    holder: int | None = None  # the one position along the expert axis that holds it; None: all

    @property
    def of_experts(self) -> bool:
        """Whether the ranks of the expert axis hold different values under this name."""
        return self.holder is not None or (self.slice is not None and self.slice.axis == "expert")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter or buffer of the whole model."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(kw_only=True)
class ShardTable:
    """The parts of a model's parameters by name. Layouts that split a parameter record it here."""

    layout: Layout
    mesh: Mesh
    parameters: Mapping[str, Entry]  # of the whole model, in its order
    state: Mapping[str, Entry]  # of its state dict
    frozen: frozenset[str] = frozenset()  # the `parameters` that need no gradient
    tied: Mapping[str, str] = field(default_factory=dict)  # a parameter's further names -> its name in `parameters`
    table: dict[str, Part] = field(default_factory=dict)
    owners: Owners | None = None  # given if gradients are reduced to one rank of the shard group (ZeRO-1)

    @classmethod
    def of(cls, model: nn.Module, layout: Layout, mesh: Mesh) -> "ShardTable":
        """Make the table of a model that is still whole."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        every_name = model.named_parameters(remove_duplicate=False)
        return cls(
            layout=layout,
            mesh=mesh,
            parameters={name: Entry(shape=p.shape, dtype=p.dtype) for name, p in model.named_parameters()},
            tied={name: names[parameter] for name, parameter in every_name if names[parameter] != name},
            frozen=frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
            state={name: Entry(shape=value.shape, dtype=value.dtype) for name, value in model.state_dict().items()},
        )

    def part(self, name: str) -> Part:
        return self.table.get(name, _WHOLE)

    def buffers(self) -> dict[str, Entry]:
        """The entries of the model's state dict that are no parameters."""
        parameters = {**self.parameters, **self.tied}
        return {name: entry for name, entry in self.state.items() if name not in parameters}

    def holds(self, name: str) -> bool:
        """Whether this rank's pipeline stages and experts include a parameter or buffer."""
        part = self.part(name)
        of_stage = part.stages is None or self.mesh.coordinate("pipeline") in part.stages
        return of_stage and part.holder in (None, self.mesh.coordinate("expert"))

    def add_sum(self, name: str, group: dist.ProcessGroup) -> None:
        """Record that a parameter's gradient must be summed over a group after backward."""
        part = self.part(name)
        self.table[name] = replace(part, sum_over=(*part.sum_over, group))

    def whole_parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the whole model, on every rank; every rank must ask."""
        parameters = dict(model.named_parameters())
        for name, entry in self.parameters.items():
            yield name, self._whole(name, entry, parameters.get(name)).contiguous()

    def whole_state(self, model: nn.Module, *, kept: bool = True) -> dict[str, Tensor]:
        """The whole model's state dict, on the CPU; every rank must ask.

        A rank gathers one tensor at a time. Ranks without `kept` return {}.
        """
        values = model.state_dict()
        state: dict[str, Tensor] = {}
        for name, entry in self.state.items():
            value = self._whole(name, entry, values.get(name))
            if kept:
                state[name] = value.cpu().contiguous()
        return state

    def _whole(self, name: str, entry: Entry, own: Tensor | None) -> Tensor:
        """Gather a parameter or buffer over shards and slices, then broadcast it from expert and pipeline ranks."""
        part = self.part(name)
        stages = part.stages
        if self.holds(name):
            assert own is not None, name
            value = whole(own.detach())
            if part.slice is not None:
                value = part.slice.gather(value)
        else:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=self.mesh.grid.device_type)
        if part.holder is not None:  # first within its stage, since the pipeline's broadcast comes from one rank
            value = self._from("expert", part.holder, value)
        if stages is not None and self.mesh.size("pipeline") > 1:
            value = self._from("pipeline", stages[0], value)
        return value

    def _from(self, axis: str, position: int, value: Tensor) -> Tensor:
        """Broadcast a value from the rank at a position of an axis; every rank along the axis must ask."""
        # Offloaded values are moved to the device, whose back end the broadcast uses.
        value = value.to(self.mesh.grid.device_type).contiguous()
        dist.broadcast(value, src=self.mesh.ranks(axis)[position], group=self.mesh.group(axis))
        return value

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum the gradients that backward left in parts; parameters that no rank used keep `grad=None`."""
        for group, parameters in self._sums(model).items():
            sum_gradients_over(group, parameters, self.mesh.grid.device_type)

    def find_owners(self, model: nn.Module, stepped: Callable[[int], Iterable[nn.Parameter]]) -> None:
        """Under ZeRO-1, record which rank steps which parameter; every rank must ask.

        `stepped`: returns the parameters that a position on the shard axis steps.
        """
        if self.owners is not None:
            shared = self.not_of_experts(model)
            kept = set(shared)
            sums = {group: [p for p in parameters if p in kept] for group, parameters in self._sums(model).items()}
            self.owners.learn(shared, stepped, sums)

    def not_of_experts(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of which all ranks of the expert axis hold the same values, or shards of them."""
        return [p for name, p in model.named_parameters() if not self.part(name).of_experts]

    def _sums(self, model: nn.Module) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        """The parameters whose gradients backward leaves in parts, by the groups to sum over."""
        groups: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        if not any(part.sum_over for part in self.table.values()):
            return groups
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for group in self.part(name).sum_over:
                    groups.setdefault(group, []).append(parameter)
        return groups

    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different parts of the gradient; None if every rank holds all of it.

        The squared norm of the whole gradient is the sum over these ranks of (own squares / `copies`). Ranks that
        differ only along other axes (replicas, context) hold the same gradients and compute the same norm.
        """
        split = [name for name in self._splitting() if self.mesh.size(name) > 1]
        return self.mesh.group(*split) if split else None

    def copies(self, name: str, parameter: Tensor) -> int:
        """The number of ranks of `norm_group` that hold the same part of a parameter as this one."""
        part = self.part(name)
        count = 1
        if part.slice is None or part.slice.axis != "tensor":
            count *= self.mesh.size("tensor")
        if part.stages is None:
            count *= self.mesh.size("pipeline")
        else:
            count *= len(part.stages)
        one_alone = isinstance(parameter, DTensor) or (self.owners is not None and self.owners.has(parameter))
        if "shard" in self._splitting() and not one_alone:
            # Every shard rank has all of this gradient: the sum of squares must count it once.
            count *= self.mesh.size("shard")
        # DTensors other than experts are sharded over the expert axis as well.
        if not part.of_experts and not isinstance(parameter, DTensor):
            count *= self.mesh.size("expert")
        return count

    def _splitting(self) -> tuple[str, ...]:
        """The mesh axes along which ranks hold different parts of gradients."""
        shard = ("shard",) if self.layout.zero >= 2 or self.owners is not None else ()
        return ("pipeline", *shard, "expert", "tensor")


_WHOLE = Part()


def whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor from the ranks that hold its shards, all of which must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_gradients_over(group: dist.ProcessGroup, parameters: Iterable[nn.Parameter], device_type: str) -> None:
    """Sum gradients over a group, in messages of about 25 MiB; parameters that no rank used keep `grad=None`.

    The copy of one message's result overlaps with the next message.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    used = largest([parameter.grad is not None for parameter in trained], group, device_type)
    # So at most two messages are held at a time.
    pending: GradientMessage | None = None
    for bucket in buckets([parameter for parameter, by_any in zip(trained, used, strict=True) if by_any]):
        for dtype in dict.fromkeys(parameter.dtype for parameter in bucket):
            sent = GradientMessage.send([p for p in bucket if p.dtype == dtype], group, device_type)
            if pending is not None:
                pending.put_back()
            pending = sent
    if pending is not None:
        pending.put_back()


@dataclass(frozen=True)
class GradientMessage:
    """A pending all-reduce of gradients."""

    work: dist.Work
    flat: Tensor
    gradients: Sequence[Tensor]

    @classmethod
    def send(
        cls, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device_type: str
    ) -> "GradientMessage":
        """Start to all-reduce gradients of one dtype, as one flat message [all elements]."""
        gradients: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                # Another rank used it: this rank sends zeros, as all ranks' messages must have one length.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local(parameter.grad))
        # Offloaded gradients are moved to the device, whose back end is faster than gloo on the CPU.
        flat = torch.cat([gradient.reshape(-1).to(device_type) for gradient in gradients])  # [numbers of all of them]
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return cls(work, flat, gradients)

    def put_back(self) -> None:
        """Wait for the sums, and write them into the gradients in place."""
        self.work.wait()
        sums = self.flat.split([gradient.numel() for gradient in self.gradients])
        shaped = [part.view_as(gradient) for part, gradient in zip(sums, self.gradients, strict=True)]
        foreach.copy_(list(self.gradients), shaped)


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Consecutive indices of a dimension that are contiguous in the whole tensor and in this rank's memory."""

    whole: int  # the first one's index in the whole
    memory: int  # and in this rank's memory
    length: int

    def within(self, start: int, length: int) -> "_Span":
        """The intersection with memory indices `start` to `start + length`, relative to `start`."""
        first, last = max(self.memory, start), min(self.memory + self.length, start + length)
        return _Span(whole=self.whole + first - self.memory, memory=first - start, length=max(0, last - first))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A box of the whole tensor, and its place in this rank's memory."""

    offsets: tuple[int, ...]  # where they begin in the whole
    memory: tuple[slice, ...]
    sizes: tuple[int, ...]


def places_of(tensor: Tensor, part: Part, shape: torch.Size) -> list[Placed]:
    """The boxes of the whole tensor that a rank's tensor holds, with their places in its memory."""
    # [dimensions][spans]: boxes are the products of one span of each dimension.
    spans = [[_Span(whole=0, memory=0, length=length)] for length in shape]
    if part.slice is not None:
        spans[part.slice.dim] = _spans_of(part.slice)
    if isinstance(tensor, DTensor):
        # The chunk of the global tensor that a DTensor holds, by the method that torch.distributed.checkpoint calls.
        (chunk,) = tensor.__create_chunk_list__()  # where this rank's shard lies in the slice
        spans = [
            [span.within(start, length) for span in along]
            for along, start, length in zip(spans, chunk.offsets, chunk.sizes, strict=True)
        ]
    return [
        Placed(
            offsets=tuple(span.whole for span in box),
            memory=tuple(slice(span.memory, span.memory + span.length) for span in box),
            sizes=tuple(span.length for span in box),
        )
        for box in product(*spans)
        if all(span.length for span in box)
    ]


def _spans_of(part: Slice) -> list[_Span]:
    """A slice's ranges of the whole dimension, with the place of each in this rank's memory."""
    spans: list[_Span] = []
    memory = 0
    for first, last in part.mine:
        spans.append(_Span(whole=first, memory=memory, length=last - first))
        memory += last - first
    return spans
