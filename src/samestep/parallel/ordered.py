"""Gradients summed in one order under every layout, so that one rank and many give bitwise equal results.

The global batch is cut into V virtual ranks, each with a forward and backward of its own. Their gradients are the
leaves of a binary tree over 0 ... V-1 that no layout changes:

    V = 6:   ((0 + 1) + (2 + 3)) + (4 + 5)

A rank holds consecutive leaves and computes the nodes of the tree above them alone. The remaining sums, at most two
for each level, are sent to the ranks that complete the tree, each for its part of the elements, as in a
reduce-scatter. A leaf without samples, or whose samples do not use a parameter, is zero. EasyScale (Li et al. 2022,
arXiv 2208.14228) uses virtual ranks in this way to keep elastic jobs deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.mesh import Mesh
from samestep.comm.messages import largest
from samestep.data.loader import MicroBatch
from samestep.data.order import bounds
from samestep.errors import UserError
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.exact.buffers import Versions, versions
from samestep.parallel.fsdp import put_back
from samestep.parallel.loss.vocabulary import Backward
from samestep.parallel.parallel_model import ParallelModel, Term, WholeModel
from samestep.parallel.sharding import local
from samestep.parallel.unused_parameters import sharded_units
from samestep.parallel.zero1 import buckets
from samestep.torch_internals import foreach

Leaves = tuple[int, int]  # the first of a sum's leaves, and one past the last


def completed_by(below: Leaves, top: Leaves, leaves: int) -> bool:
    """Whether two neighbouring sums are the children of one node of the tree over `leaves` leaves."""
    size = below[1] - below[0]
    return (
        # The left child is a full subtree of 2^k leaves that begins at a multiple of 2^(k+1); the right one begins
        # where it ends, and may be shorter at the end of the leaves.
        size & (size - 1) == 0 and below[0] % (2 * size) == 0 and top == (below[1], min(below[0] + 2 * size, leaves))
    )


def held_sums(first: int, last: int, leaves: int) -> list[Leaves]:
    """The maximal nodes of the tree that cover leaves `first` to `last`, each as a range of leaves."""
    sums: list[Leaves] = []
    for leaf in range(first, last):
        sums.append((leaf, leaf + 1))
        while len(sums) > 1 and completed_by(sums[-2], sums[-1], leaves):
            _, last_one = sums.pop(), sums.pop()
            sums.append((last_one[0], leaf + 1))
    return sums


def total(sums: Sequence[tuple[Leaves, Tensor]], leaves: int) -> Tensor:
    """Compute the root of the tree from sums that cover all leaves in order; the tensors are overwritten."""
    stack: list[tuple[Leaves, Tensor]] = []
    for part in sums:
        stack.append(part)
        while len(stack) > 1 and completed_by(stack[-2][0], stack[-1][0], leaves):
            (_, last), right = stack.pop()
            (first, _), left = stack.pop()
            stack.append(((first, last), left.add_(right)))
    ((_, root),) = stack
    return root


def total_of_halves(values: Tensor) -> Tensor:
    """Sum over the last dimension by repeatedly adding its second half to its first.

    The order of `Tensor.sum` depends on the shape, and so on the number of rows of a rank.
    """
    while (length := values.shape[-1]) > 1:
        half = -(-length // 2)
        added = values[..., :half].clone()
        added[..., : length - half] += values[..., half:]
        values = added
    return values.sum(-1)  # of at most one element


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """A rank of the data group: the sums that it holds, and its rows of each parameter's gradient."""

    sums: Sequence[Leaves]
    rows: Sequence[tuple[int, int]]  # of each trained parameter; a scalar is one row


class OrderedSums:
    """The gradients of the virtual ranks that this rank holds, and their sum over all ranks.

    Why the results are bitwise equal: floating-point addition is commutative but not associative, so the result only
    depends on the tree, which is a function of V. A rank only adds nodes both of whose children it holds, and the
    ranks that complete the tree add the rest in the order of the leaves. Sums with zeros are exact, so a rank without
    samples changes nothing (except the sign of a zero).
    """

    def __init__(self, model: nn.Module, mesh: Mesh, virtual_ranks: int) -> None:
        self.virtual_ranks = virtual_ranks
        self.first, self.last = bounds(virtual_ranks, mesh.data_place.index, mesh.data_place.of)
        self._group = mesh.data_group
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rank = dist.get_rank(self._group)
        self._peers = self._find_peers()
        self._sharded = any(isinstance(parameter, DTensor) for parameter in self._trained)
        self._gathered = _gathered_parameters(model) if self._sharded else {}
        self._stack: list[tuple[Leaves, list[Tensor]]] = []
        self._used = [False] * len(self._trained)

    def _find_peers(self) -> list[_Peer]:
        """The leaves and rows of every rank of the data group, in the order of ranks. Every rank asks."""
        this_rank = _Peer(
            sums=held_sums(self.first, self.last, self.virtual_ranks),
            rows=[_rows_of(parameter) for parameter in self._trained],
        )
        peers: list[_Peer | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(peers, this_rank, group=self._group)
        return [peer for peer in peers if peer is not None]

    def add(self, number: int, *, counts: bool) -> None:
        """Move the gradients of this rank's micro-batch `number` from the parameters into the tree.

        `counts`: False for a zero-weight micro-batch, whose gradients are replaced by zeros.
        """
        leaf = self.first + number
        gradients = [self._take_gradient(parameter) for parameter in self._trained]
        if leaf >= self.last:
            return
        values: list[Tensor] = []
        for place, (parameter, gradient) in enumerate(zip(self._trained, gradients, strict=True)):
            if gradient is None or not counts:
                values.append(local(parameter.detach()).new_zeros(parameter.shape))
            else:
                self._used[place] = True
                values.append(gradient)
        self._stack.append(((leaf, leaf + 1), values))
        while len(self._stack) > 1 and completed_by(self._stack[-2][0], self._stack[-1][0], self.virtual_ranks):
            (_, last), right = self._stack.pop()
            (first, _), left = self._stack.pop()
            foreach.add_(left, right)
            self._stack.append(((first, last), left))

    def _take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Take a parameter's whole gradient; that of a sharded one is at the parameter that FSDP2 gathered."""
        holder = self._gathered[parameter]() if isinstance(parameter, DTensor) else parameter
        if holder is None:
            return None
        gradient, holder.grad = holder.grad, None
        return gradient

    def complete(self, facts: Tensor) -> Tensor:
        """Set the gradients to the sums over all virtual ranks; of sharded parameters to this rank's rows.

        `facts`: [virtual ranks, numbers] float64, zero for other ranks' virtual ranks. Returns those of all ranks.
        """
        any_used, reduced = self._all_reduce_facts(facts)
        numbers = {parameter: number for number, parameter in enumerate(self._trained)}
        used = [p for p, used_by in zip(self._trained, any_used, strict=True) if used_by]
        for sharded in (False, True):
            for dtype in dict.fromkeys(parameter.dtype for parameter in used):
                some = [p for p in used if p.dtype == dtype and isinstance(p, DTensor) is sharded]
                for bucket in buckets(some):
                    self._sum_bucket([numbers[parameter] for parameter in bucket], sharded=sharded)
        self._stack = []
        self._used = [False] * len(self._trained)
        return reduced.view(facts.shape)

    def _all_reduce_facts(self, facts: Tensor) -> tuple[Sequence[float], Tensor]:
        """All-reduce whether any rank used each parameter, and `facts`.

        Each sum has one rank's number and zeros, so it is exact.
        """
        if len(self._peers) == 1:
            return self._used, facts
        if facts.device.type != "cpu":  # flags are reduced on the CPU, so that the host does not wait for the device
            facts = facts.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(facts, group=self._group)
            return largest(self._used, self._group, facts.device.type), facts
        used = torch.tensor(self._used, dtype=torch.float64)
        message = torch.cat([used, facts.reshape(-1)])  # [parameters + virtual ranks * numbers]
        dist.all_reduce(message, group=self._group)
        any_used, reduced = message.split([len(used), facts.numel()])
        return any_used.tolist(), reduced

    def _sum_bucket(self, numbers: Sequence[int], *, sharded: bool) -> None:
        """Complete the tree for some parameters, and set their gradients to the sums."""
        parameters = [self._trained[number] for number in numbers]
        # [sums][parameters]: each of this rank's sums has a whole gradient for every parameter of the bucket.
        by_sum = [[as_real(tensors[number]) for number in numbers] for _, tensors in self._stack]
        if not sharded:
            flat = self._sum_whole([torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in by_sum])
        else:
            flat = self._sum_rows(numbers, by_sum)
        sizes = [local(parameter.detach()).numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
        for parameter, values in zip(parameters, flat.split(sizes), strict=True):
            gradient = torch.zeros_like(parameter.detach())
            as_memory = local(gradient)
            real = torch.view_as_real(as_memory) if as_memory.is_complex() else as_memory
            real.copy_(values.view_as(real))
            parameter.grad = gradient

    def _sum_whole(self, flat: Sequence[Tensor]) -> Tensor:
        """Sum gradients that every rank needs whole: each rank sums its part, then all-gather."""
        ranks = len(self._peers)
        if ranks == 1:
            return total(list(zip(self._peers[0].sums, flat, strict=True)), self.virtual_ranks)
        # Every rank completes a part of equal length, the last ones padded with zeros.
        part = -(-flat[0].numel() // ranks)
        padded = torch.stack([nn.functional.pad(values, (0, part * ranks - values.numel())) for values in flat])
        message = padded.view(len(flat), ranks, part).transpose(0, 1).reshape(-1)  # [ranks, sums, part]
        # All-to-all and all-gather, since the back end chooses the order of an all-reduce.
        own_part = self._exchanged(message, [len(flat) * part] * ranks, part)
        whole = own_part.new_empty(ranks, part)  # every rank's completed part
        dist.all_gather(list(whole.unbind()), own_part, group=self._group)
        return whole.view(-1)[: flat[0].numel()]

    def _sum_rows(self, numbers: Sequence[int], by_sum: Sequence[Sequence[Tensor]]) -> Tensor:
        """Sum rows of parameters, each on the ranks that hold a shard of them."""
        parts: list[Tensor] = []
        sizes: list[int] = []
        for peer in self._peers:
            before = sum(part.numel() for part in parts)
            for tensors in by_sum:
                for number, tensor in zip(numbers, tensors, strict=True):
                    first, last = peer.rows[number]
                    parts.append(tensor[first:last].reshape(-1))
            sizes.append(sum(part.numel() for part in parts) - before)
        own = sizes[self._rank] // len(by_sum)
        # [peers][sums][rows of the peer]: the order in which `_exchanged` splits the message.
        return self._exchanged(torch.cat(parts), sizes, own)

    def _exchanged(self, message: Tensor, sizes: Sequence[int], own: int) -> Tensor:
        """All-to-all the sums' parts, and complete the tree for this rank's `own` elements."""
        counts = [len(peer.sums) for peer in self._peers]
        received = message.new_empty(sum(counts) * own)
        dist.all_to_all_single(received, message, [count * own for count in counts], list(sizes), group=self._group)
        leaves = [sum_ for peer in self._peers for sum_ in peer.sums]  # of all ranks, in the order received
        summands = list(zip(leaves, received.view(len(leaves), own).unbind(), strict=True))
        return total(sorted(summands, key=lambda summand: summand[0]), self.virtual_ranks)

    def squares(self) -> Tensor:
        """The sum of squares of all gradients in float64, in an order that does not depend on the sharding."""
        used = [number for number, parameter in enumerate(self._trained) if parameter.grad is not None]
        lengths = [_row_count(self._trained[number]) for number in used]
        device = local(self._trained[0].detach()).device
        # [rows of all used parameters]: the sum of squares of a row is computed where the row is held, and rows are
        # added up by every rank in the same order.
        by_row = torch.zeros(sum(lengths), dtype=torch.float64, device=device)
        own_rows = self._peers[self._rank].rows
        for number, rows in zip(used, by_row.split(lengths), strict=True):
            gradient, (first, last) = self._trained[number].grad, own_rows[number]
            # Rows that several ranks hold are counted by the first of them.
            counts = not self._sharded or all(
                peer.rows[number] != own_rows[number] for peer in self._peers[: self._rank]
            )
            if gradient is not None and counts and gradient.numel() and last > first:
                values = as_real(local(gradient)).reshape(last - first, -1).double()
                rows[first:last] = total_of_halves(values * values)
        if self._sharded:
            dist.all_reduce(by_row, group=self._group)  # exact: each row is nonzero on one rank only
        return total_of_halves(by_row)


def _row_count(parameter: nn.Parameter) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _rows_of(parameter: nn.Parameter) -> tuple[int, int]:
    """The rows of a whole parameter that this rank has."""
    if not isinstance(parameter, DTensor):
        return 0, _row_count(parameter)
    (chunk,) = parameter.__create_chunk_list__()
    return chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]


def _gathered_parameters(model: nn.Module) -> dict[nn.Parameter, Callable[[], nn.Parameter | None]]:
    """Map each sharded parameter to a function that returns its gathered parameter of the last forward.

    FSDP2 puts the gathered parameter, which gets the gradient, into its module while the module's forward runs.
    """
    seen: dict[str, nn.Parameter] = {}
    sharded = dict(model.named_parameters())
    for module, parameters in sharded_units(model):

        def note(_: nn.Module, __: object, parameters: Sequence[tuple[nn.Module, str, str]] = parameters) -> None:
            for owner, attribute, name in parameters:
                seen[name] = getattr(owner, attribute)

        module.register_forward_pre_hook(note)  # FSDP2's own hook, which gathers, runs before it
    return {parameter: (lambda name=name: seen.get(name)) for name, parameter in sharded.items()}


class OrderedModel(ParallelModel):
    """A whole or sharded model with a forward and backward for each virtual rank, and an ordered sum of gradients."""

    def __init__(self, whole: WholeModel, virtual_ranks: int) -> None:
        """`whole`: a model without gradient averaging, or a sharded one."""
        super().__init__(
            model=whole.model,
            parts=whole.parts,
            forward_context=whole.forward_context,
            autocast=whole.autocast,
            host=whole.host,
            disk=whole.disk,
            buffers=whole.buffers,
        )
        self._whole = whole
        self._checked = False
        self.sums = OrderedSums(whole.model, whole.parts.mesh, virtual_ranks)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        term: Term,
        backward: Backward,
        forwards_done: Callable[[], None],
    ) -> None:
        """Run each micro-batch as one virtual rank; `forwards_done` is called after the last backward."""
        before = {} if self._checked else versions(self.model)  # a forward that writes one does so in the first step
        for number, micro_batch in enumerate(micro_batches):
            with self._whole.accumulating():
                backward(self._whole.forward(micro_batch, term))
            self.sums.add(number, counts=not micro_batch.moment.zero_weight)
        put_back(self.model)  # ZeRO-2 keeps parameters gathered between micro-batches
        if not self._checked:
            self._checked = True
            self._check_buffers(before)
            self._whole.watch_draws(buffers_moved=False)
        forwards_done()

    def _check_buffers(self, before: Versions) -> None:
        """Raise UserError if a forward has written to a buffer, which the next virtual rank would read."""
        for name, version in versions(self.model).items():
            if version != before.get(name):
                raise UserError(
                    f"run.reduction is ordered, and a training forward writes the buffer {name}, which the forwards "
                    "of other ranks would not see; use reduction: fast, or a model without such buffers"
                )

    def predict(self, inputs: Any) -> Any:
        return self._whole.predict(inputs)
