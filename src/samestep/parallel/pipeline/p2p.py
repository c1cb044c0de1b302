"""Point-to-point messages: activations and their gradients between ranks that hold neighbouring stages.

Who sends what, for stages s and s + 1 on different ranks: "F" messages go from s to s + 1 with the activations that
later stages take, "B" messages from s + 1 to s with the gradients of those of them that have one. Shapes are the
model's own, such as [batch, tokens, features].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.mesh import Mesh, new_group
from samestep.parallel.pipeline.stage import pipelines
from samestep.parallel.valueless import labelled

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_MOST_DIMS = 8
_AHEAD = 2  # receives that are posted ahead of use


@dataclass(frozen=True, kw_only=True)
class MessageId:
    """Identifies the tensors that stage `to` needs for the forward or the backward of a micro-batch."""

    to: int
    kind: str  # F: activations; B: the gradients of those that have one
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)


Forms = tuple[TensorSpec, ...]


def has_gradient(tensor: Tensor | TensorSpec) -> bool:
    """Whether a tensor's gradient is sent back; false for masks and indices."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


@dataclass(kw_only=True)
class _Line:
    """The messages from one rank, in its order of sending."""

    group: dist.ProcessGroup
    source: int
    expected: list[MessageId] = field(default_factory=list)
    posted: dict[MessageId, tuple[list[Tensor], list[dist.Work]]] = field(default_factory=dict)


class StageMessages:
    """Asynchronous sends and receives between stages.

    Every ordered pair of ranks has its own process group, so that each group carries messages in one direction and
    one order, without tags. Tensors of one message are one batch, which NCCL sends through the group's communicator;
    for single sends it would create another communicator at the first of them, when the peer may be waiting for
    something else. The forms (shapes and dtypes) of activations are sent in a header the first time that a
    micro-batch's inputs have new shapes; a gradient has the form of its activation.

    Why this can't deadlock: sends are posted and never waited for within a step. A receive only waits for messages
    that its sender sends earlier, both sides know the sender's order (`begin` gets every rank's sends), and
    `schedule` gives orders without circular waits (`timeline.ideal_times` simulates them and raises otherwise).
    """

    def __init__(self, mesh: Mesh, rank_of: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        """`rank_of`: the pipeline rank of each stage; `counts`: how many tensors each stage passes to the next."""
        self._counts = counts
        self._rank_of = rank_of
        self._device = device
        self._me = mesh.coordinate("pipeline")
        self._ranks = mesh.ranks("pipeline")
        self._to: dict[int, dist.ProcessGroup] = {}
        self._from: dict[int, _Line] = {}
        self._turn = 0  # number of the running step or chunk
        # (turn, works, tensors) of pending sends, whose tensors must not be freed or written to.
        self._sent: list[tuple[int, list[dist.Work], Sequence[Tensor]]] = []
        self._here: dict[MessageId, list[Tensor]] = {}
        self._forms: dict[Any, Forms] = {}  # of activations, by stage and shapes of inputs
        self._key: Callable[[MessageId], Any] = lambda message: message
        self._gradient_forms: dict[MessageId, Forms] = {}
        self._connect(mesh)

    def _connect(self, mesh: Mesh) -> None:
        """Make a process group for each ordered pair of neighbouring ranks, in every pipeline of the grid."""
        # Every rank makes every pipeline's groups in the same order, as `new_group` is a collective of all ranks.
        neighbours = {(a, b) for a, b in zip(self._rank_of, self._rank_of[1:], strict=False) if a != b}
        for a, b in sorted(neighbours | {(b, a) for a, b in neighbours}):
            for line in pipelines(mesh):
                group = new_group([line[a], line[b]])
                if line != self._ranks or self._me not in (a, b):
                    continue
                if self._device.type != "cpu":  # creates the communicator here, in the same order on both sides
                    dist.all_reduce(torch.zeros(1, device=self._device), group=group)
                if a == self._me:
                    self._to[b] = group
                if b == self._me:
                    self._from[a] = _Line(group=group, source=line[a])

    def begin(self, sends: Sequence[Sequence[MessageId]], key: Callable[[MessageId], Any]) -> None:
        """Begin a step or a chunk. `sends`: the messages of every rank, in its order of sending.

        `key`: for a message, the key on which the forms of its activations depend.
        """
        self._key = key
        self._turn += 1
        self._gradient_forms.clear()
        for rank, line in self._from.items():
            line.expected += [message for message in sends[rank] if self._rank_of[message.to] == self._me]

    def send(self, message: MessageId, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors to a stage; returns at once. Activations of a new form are preceded by a header."""
        target = self._rank_of[message.to]
        # The receiver allocates contiguous tensors.
        sent = [tensor.detach().contiguous() for tensor in tensors]
        forms = tuple(TensorSpec.of(tensor) for tensor in sent)
        if message.kind == "F":
            back = MessageId(to=message.to - 1, kind="B", micro_batch=message.micro_batch)
            self._gradient_forms[back] = tuple(form for form in forms if has_gradient(form))
        # Between two stages of one rank, tensors are passed without a copy, as leaves of a new graph.
        if target == self._me:
            self._here[message] = sent
            return
        if message.kind == "F" and sent and self._announced(message, forms) is None:
            key = self._key(message)
            self._post(target, [labelled(_header(forms), (message.to, key), like=key)])
            self._forms[message.to, key] = forms
        if sent:
            self._post(target, self._labelled(message, sent))

    def _labelled(self, message: MessageId, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [labelled(tensor, (self._turn, message, number)) for number, tensor in enumerate(tensors)]

    def _announced(self, message: MessageId, forms: Forms) -> Forms | None:
        """The forms that the receiver already knows, or None. Raises RuntimeError if the tensors' forms differ."""
        announced = self._forms.get((message.to, self._key(message)))
        if announced is not None and announced != forms:
            now, before = next((a, b) for a, b in zip(forms, announced, strict=True) if a != b)
            raise RuntimeError(
                f"stage {message.to - 1} hands on {now.shape} of {now.dtype}, and before, for inputs of "
                f"the same shapes, {before.shape} of {before.dtype}: a pipeline needs a shape that no value decides"
            )
        return announced

    def _post(self, target: int, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors as one batch, and drop completed sends."""
        self._sent = [sent for sent in self._sent if not all(work.is_completed() for work in sent[1])]
        peer, group = self._ranks[target], self._to[target]
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer, group) for tensor in tensors])
        self._sent.append((self._turn, works, tensors))

    def receive(self, message: MessageId) -> list[Tensor]:
        """Wait for a message; posts receives of all messages that its sender sends before it."""
        source = self._rank_of[message.to + (-1 if message.kind == "F" else 1)]
        if source == self._me:
            self._gradient_forms.pop(message, None)
            return self._here.pop(message)
        line = self._from[source]
        # Messages arrive in the sender's order, so receives of those before this one are posted first.
        while message not in line.posted:
            self._ask(line)
        tensors, works = line.posted.pop(message)
        # Further receives are posted ahead, to overlap the transfer with computation; only for known forms, since the
        # header of an unknown one would have to be waited for.
        while len(line.posted) < _AHEAD and line.expected and self._forms_of(line.expected[0]) is not None:
            self._ask(line)
        with self._waiting_for(message, "values"):
            for work in works:
                work.wait()
        return tensors

    @contextmanager
    def _waiting_for(self, message: MessageId, what: str) -> Iterator[None]:
        """Context of a wait, ended by the group's timeout or by its peer; the error names what was awaited."""
        try:
            yield
        except RuntimeError as error:
            source = message.to + (-1 if message.kind == "F" else 1)
            kind = "activations" if message.kind == "F" else "gradients"
            raise RuntimeError(
                f"stage {message.to} waited for the {what} of the {kind} that stage {source} sends, on rank "
                f"{self._ranks[self._rank_of[source]]}, of micro-batch {message.micro_batch}: {error}"
            ) from error

    def _forms_of(self, message: MessageId) -> Forms | None:
        """The shapes and dtypes of a message to receive; None if its header has not arrived."""
        if message.kind == "B":
            return self._gradient_forms.get(message)
        if not self._counts[message.to - 1]:
            return ()
        return self._forms.get((message.to, self._key(message)))

    def _ask(self, line: _Line) -> None:
        """Post the receive of the line's next message; waits for its header if its form isn't known."""
        message = line.expected.pop(0)
        forms = self._forms_of(message)
        if forms is None:
            # The header is on the CPU, so that the host doesn't wait for the accelerator.
            header = torch.empty(self._counts[message.to - 1], _MOST_DIMS + 2, dtype=torch.int64)
            key = self._key(message)
            labelled(header, (message.to, key), like=key)
            with self._waiting_for(message, "shapes"):
                dist.recv(header, src=line.source, group=line.group)
            forms = self._forms[message.to, key] = _read(header)
        if message.kind == "B":
            del self._gradient_forms[message]
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        self._labelled(message, tensors)
        receives = [dist.P2POp(dist.irecv, tensor, line.source, line.group) for tensor in tensors]
        line.posted[message] = tensors, dist.batch_isend_irecv(receives) if receives else []

    def finish(self, turns_ago: int = 0) -> None:
        """Wait until all sends of turns up to this one, or up to `turns_ago` turns before, are complete."""
        for turn, works, _ in self._sent:
            if turn <= self._turn - turns_ago:
                for work in works:
                    work.wait()
        self._sent = [sent for sent in self._sent if sent[0] > self._turn - turns_ago]


def _header(forms: Forms) -> Tensor:
    """Encode forms as a header [tensors, 2 + most dimensions]: dtype, number of dimensions, and sizes."""
    rows = [
        [_DTYPES.index(form.dtype), len(form.shape), *form.shape, *([0] * (_MOST_DIMS - len(form.shape)))]
        for form in forms
    ]
    return torch.tensor(rows, dtype=torch.int64)


def _read(header: Tensor) -> Forms:
    return tuple(
        TensorSpec(shape=tuple(sizes[:dims]), dtype=_DTYPES[dtype]) for dtype, dims, *sizes in header.tolist()
    )
