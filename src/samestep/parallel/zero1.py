"""ZeRO-1: whole parameters on every data rank; one rank of a group owns a parameter, keeps its state and steps it.

A parameter's gradient is summed on its owner (Rajbhandari et al. 2020, ZeRO, section 5.1).

A step, for a group of n ranks along the shard axis:

    backward     DDP hands over a bucket; each gradient is divided by the data ranks and reduced to its owner
    settle       owners have the sums of their group; the other ranks set theirs to zero
    sum_replicas owners of one parameter in different replicas (and expert ranks) add theirs up by an all-reduce
    clip         the norm is over owners' gradients: each counts once, zeros add nothing
    step         each rank steps the parameters that it owns
    broadcast    owners give the new values to their group: at once, or in the next forward (optimizer/late.py)

Compared with DDP a rank sends about as many bytes: n - 1 of n for the reduce and the same for the broadcast, where an
all-reduce sends twice that. The optimizer's state is held once in the group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.optim import Optimizer

from samestep.comm.compression.wire import flat, put_back
from samestep.comm.mesh import Mesh
from samestep.comm.messages import largest
from samestep.parallel.optimizer.joined import rebuild
from samestep.parallel.optimizer.kinds import Make
from samestep.parallel.optimizer.late import LateParameters, Message
from samestep.parallel.valueless import has_values
from samestep.torch_internals import foreach
from samestep.torch_internals.sharded import zero_optimizer

BUCKET_BYTES = 25 * 2**20  # what DistributedDataParallel sends at once


def buckets(parameters: Iterable[nn.Parameter], most: int = BUCKET_BYTES) -> Iterator[list[nn.Parameter]]:
    """Split the trained parameters into buckets of about `most` bytes.

    A parameter is never cut: a bucket ends after the one that reaches `most` bytes. Frozen parameters are left out.
    """
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= most:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


Sums = Mapping[dist.ProcessGroup, Sequence[nn.Parameter]]


class Owners:
    """The rank of the shard group that steps each parameter; empty until `learn` is called."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device_type = mesh.grid.device_type
        self._ranks: dict[nn.Parameter, int] = {}
        # Pending messages: (work, message, parameters, owner).
        self._sent: list[tuple[dist.Work, Tensor, list[nn.Parameter], int | None]] = []

    @property
    def data_ranks(self) -> int:
        return self._mesh.data_place.of

    def has(self, parameter: Any) -> bool:
        """Whether a parameter has an owner, on which alone its gradient is kept."""
        return parameter in self._ranks

    def learn(
        self, parameters: Iterable[nn.Parameter], stepped: Callable[[int], Iterable[nn.Parameter]], sums: Sums
    ) -> None:
        """Exchange which parameters each rank of the group steps. Every rank asks.

        `stepped`: returns the parameters of a position in the group. In a rehearsal nothing is exchanged.

        `sums`: parameters whose gradients backward leaves in parts, by group. If ranks of such a group have different
        owners for a parameter, as with uneven slices, it gets none.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if all(map(has_values, trained)):
            rank = self._mesh.coordinate("shard")
            own = set(stepped(rank))
            # Each rank claims its parameters by its position, with -1 for others: the maximum is the owner.
            claims = self._largest([rank if p in own else -1 for p in trained], self._mesh.grid.get_group("shard"))
        else:
            of_all = {p: rank for rank in range(self._mesh.size("shard")) for p in stepped(rank)}
            claims = [of_all.get(parameter, -1) for parameter in trained]
        owners = dict(zip(trained, claims, strict=True))
        for group, some in sums.items():
            claims = [owners[parameter] for parameter in some]
            most = self._largest(claims, group)
            # The minimum, as the negated maximum of the negatives.
            least = self._largest([-claim for claim in claims], group)
            for parameter, high, low in zip(some, most, least, strict=True):
                if high != -low:
                    owners[parameter] = -1
        self._ranks = {parameter: claim for parameter, claim in owners.items() if claim >= 0}

    def send(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Start to reduce gradients to their owners, in one message for each owner; `settle` waits for them.

        A gradient without an owner is all-reduced over all data ranks.
        """
        data, shard = self._mesh.data_group, self._mesh.grid.get_group("shard")
        together: dict[tuple[int | None, torch.dtype], list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            together.setdefault((self._ranks.get(parameter), gradient.dtype), []).append((parameter, gradient))
        # Every rank has the same buckets and owners, and so the same order of messages, by which gloo and NCCL match
        # the collectives of a group.
        for (owner, _), some in together.items():
            message = flat([gradient for _, gradient in some])  # [numbers], a copy of them
            if owner is None:
                work = dist.all_reduce(message, group=data, async_op=True)
            else:
                work = dist.reduce(message, group_dst=owner, group=shard, async_op=True)
            assert work is not None
            self._sent.append((work, message, [parameter for parameter, _ in some], owner))

    def settle(self) -> None:
        """Wait for pending messages; the owner's gradient becomes the sum, that of other ranks zero."""
        for work, message, parameters, owner in self._sent:
            work.wait()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if owner in (None, self._mesh.coordinate("shard")):
                put_back(message, gradients)
            else:
                # Zero and not None, since the parameter was used; only the owner's gradient counts in the norm
                # (`ShardTable.copies`).
                foreach.zero_(gradients)
        self._sent = []

    def sum_replicas(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients that this rank owns over the owners in other replicas; call it after `settle`."""
        others = ("replicate", "expert")  # axes along which ranks own the same parameters
        if all(self._mesh.size(axis) == 1 for axis in others):
            return
        own_share = self._mesh.coordinate("shard")
        for bucket in buckets(p for p in parameters if self._ranks.get(p) == own_share):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                some = [gradient for gradient in gradients if gradient.dtype == dtype]
                message = flat(some)
                dist.all_reduce(message, group=self._mesh.group(*others))
                put_back(message, some)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients on their owners, after backward; parameters that no rank used keep `grad=None`."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        used = self._largest([parameter.grad is not None for parameter in trained], self._mesh.data_group)
        for bucket in buckets(p for p, any_used in zip(trained, used, strict=True) if any_used):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = gradient.div_(self.data_ranks)
            self.send(bucket, gradients)
        self.settle()
        self.sum_replicas(trained)

    def _largest(self, values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        return largest(values, group, self._device_type)


def to_owners(owners: Owners, bucket: dist.GradBucket) -> Future[Tensor]:
    """Communication hook of DistributedDataParallel that averages a bucket's gradients on their owners.

    It returns the bucket at once and `settle` waits for the sums, since a future's callback would run in a back end's
    thread.
    """
    # In place, since gradients are views of this buffer (`gradient_as_bucket_view`).
    buffer = bucket.buffer().div_(owners.data_ranks)
    parameters: list[Any] = bucket.parameters()  # PyTorch's hint says tensors
    owners.send(parameters, _gradients(bucket, parameters))
    # DDP copies nothing if the future holds the bucket itself.
    done: Future[Tensor] = Future()
    done.set_result(buffer)
    return done


def _gradients(bucket: dist.GradBucket, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """Each parameter's gradient in a bucket."""
    if not parameters[0].is_complex():  # a bucket is of one dtype
        return bucket.gradients()
    # The buffer holds pairs of real numbers, of which `bucket.gradients()` returns the first half.
    numbers = torch.view_as_complex(bucket.buffer().view(-1, 2))
    return numbers.split([parameter.numel() for parameter in parameters])


def shard_optimizer(
    optimizer: Optimizer, group: ProcessGroup, kind: Callable[..., Optimizer], late: LateParameters | None
) -> Optimizer:
    """Convert an optimizer to a ZeroRedundancyOptimizer; each rank of `group` steps a part of the parameters.

    `kind`: makes the optimizer of a part. `late`: waits for the broadcasts of updated parameters; None: the step
    does.
    """
    sharded = rebuild(optimizer, partial(_class(late), optimizer_class=kind, process_group=group))
    # The same groups, so that a schedule of the given optimizer also sets the rates here.
    sharded.param_groups = optimizer.param_groups
    return sharded


def shard_joined(optimizer: Optimizer, group: ProcessGroup, make: Make, late: LateParameters | None) -> Optimizer:
    """As `shard_optimizer`, for an optimizer that `make` makes from groups with their settings."""
    groups = optimizer.param_groups
    # The groups are copied with all settings, which PyTorch passes to the optimizer of a part.
    sharded = _class(late)(
        [{**group} for group in groups], optimizer_class=lambda part: make(part), process_group=group
    )
    sharded.param_groups = groups
    return sharded


def _class(late: LateParameters | None) -> Any:
    """Make a subclass of PyTorch's ZeroRedundancyOptimizer that broadcasts in large messages, of any dtypes."""
    return zero_optimizer(hand_round if late is None else partial(send_round, late=late))


def hand_round(of_ranks: Sequence[Sequence[nn.Parameter]], group: ProcessGroup) -> None:
    """Broadcast all parameters from their owners to the group; `of_ranks`: the parameters of each position.

    In messages of about 25 MiB, one from every owner at a time. The owners' shares may differ a lot in size, such as
    one with the embeddings, so these are broadcasts: an all-gather would pad all to the largest.
    """
    for round_ in zip_longest(*(_of_one_dtype(owned) for owned in of_ranks), fillvalue=()):
        sent = [Message.send(bucket, position, group) for position, bucket in enumerate(round_) if bucket]
        for message in sent:
            message.put()


def send_round(of_ranks: Sequence[Sequence[nn.Parameter]], group: ProcessGroup, late: LateParameters) -> None:
    """Start to broadcast all parameters, without waiting: `late` keeps the pending messages.

    Lots are sent in the order in which the next forward waits for them, and within a lot the owners take turns, so
    that every rank calls the same broadcasts in the same order.
    """
    # [ranks] of lot -> parameters. Every rank knows all ranks' partitions.
    by_lot = [late.lots(owned) for owned in of_ranks]
    for lot in sorted({lot for lots in by_lot for lot in lots}):
        of_lot = [_of_one_dtype(lots.get(lot, ())) for lots in by_lot]
        for round_ in zip_longest(*of_lot, fillvalue=()):
            for position, bucket in enumerate(round_):
                if bucket:
                    late.add(lot, Message.send(bucket, position, group))


def _of_one_dtype(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield buckets of parameters of one dtype each."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        yield from buckets(parameter for parameter in parameters if parameter.dtype == dtype)
