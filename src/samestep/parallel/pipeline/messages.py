"""Messages: hidden states and their gradients on their way between ranks that hold neighbouring stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.mesh import Mesh, new_group
from samestep.parallel.pipeline.cut import pipelines

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)
_MOST_DIMS = 8
_AHEAD = 2  # messages that are waited for while one is used


@dataclass(frozen=True, kw_only=True)
class Letter:
    """Which tensor: what stage `to` needs for the forward or the backward of a micro-batch."""

    to: int
    kind: str  # F: a hidden state; B: its gradient
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Form:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)


@dataclass(kw_only=True)
class _Line:
    """What comes from one rank, in the order in which it sends."""

    group: dist.ProcessGroup
    source: int
    expected: list[Letter] = field(default_factory=list)
    posted: dict[Letter, tuple[Tensor, Any]] = field(default_factory=dict)


class Messages:
    """Sends and receives without waiting for the other side.

    Every ordered pair of ranks has a process group of its own, so that each carries messages one way in one order,
    whatever the back end does with tags. The form of a hidden state is sent ahead the first time that a
    micro-batch's inputs have their shapes; a gradient has the form of what it is the gradient of.
    """

    def __init__(self, mesh: Mesh, rank_of: Sequence[int], device: torch.device) -> None:
        self._rank_of = rank_of
        self._device = device
        self._me = mesh.coordinate("pipeline")
        self._ranks = mesh.ranks("pipeline")
        self._to: dict[int, dist.ProcessGroup] = {}
        self._from: dict[int, _Line] = {}
        self._turn = 0  # the step or chunk that runs
        self._sent: list[tuple[int, Any, Tensor]] = []  # in which turn, and what must stay until it has left
        self._here: dict[Letter, Tensor] = {}
        self._forms: dict[Any, Form] = {}  # of hidden states, by stage and shapes of inputs
        self._key: Callable[[Letter], Any] = lambda letter: letter
        self._gradient_forms: dict[Letter, Form] = {}
        self._connect(mesh)

    def _connect(self, mesh: Mesh) -> None:
        neighbours = {(a, b) for a, b in zip(self._rank_of, self._rank_of[1:], strict=False) if a != b}
        for a, b in sorted(neighbours | {(b, a) for a, b in neighbours}):
            for line in pipelines(mesh):
                group = new_group([line[a], line[b]])
                if line != self._ranks:
                    continue
                if a == self._me:
                    self._to[b] = group
                if b == self._me:
                    self._from[a] = _Line(group=group, source=line[a])

    def begin(self, sends: Sequence[Sequence[Letter]], key: Callable[[Letter], Any]) -> None:
        """Begin a step or a chunk: what every rank is going to send, in its order.

        `key` gives what a hidden state's form depends on: the same key, the same form.
        """
        self._key = key
        self._turn += 1
        self._gradient_forms.clear()
        for rank, line in self._from.items():
            line.expected += [letter for letter in sends[rank] if self._rank_of[letter.to] == self._me]

    def send(self, letter: Letter, tensor: Tensor) -> None:
        target = self._rank_of[letter.to]
        tensor = tensor.detach().contiguous()
        if letter.kind == "F":
            self._gradient_forms[Letter(to=letter.to - 1, kind="B", micro_batch=letter.micro_batch)] = Form.of(tensor)
        if target == self._me:
            self._here[letter] = tensor
            return
        if letter.kind == "F" and self._announced(letter, tensor) is None:
            self._post(target, _header(tensor))
            self._forms[letter.to, self._key(letter)] = Form.of(tensor)
        self._post(target, tensor)

    def _announced(self, letter: Letter, tensor: Tensor) -> Form | None:
        known = self._forms.get((letter.to, self._key(letter)))
        if known is not None and known != Form.of(tensor):
            raise RuntimeError(
                f"stage {letter.to - 1} hands on {tuple(tensor.shape)} of {tensor.dtype}, and before, for inputs of "
                f"the same shapes, {known.shape} of {known.dtype}: a pipeline needs a shape that no value decides"
            )
        return known

    def _post(self, target: int, tensor: Tensor) -> None:
        self._sent = [each for each in self._sent if not each[1].is_completed()]
        work = dist.isend(tensor, dst=self._ranks[target], group=self._to[target])
        self._sent.append((self._turn, work, tensor))

    def receive(self, letter: Letter) -> Tensor:
        """Wait for a tensor, and ask for those that its sender sends before it, which may be used after it."""
        source = self._rank_of[letter.to + (-1 if letter.kind == "F" else 1)]
        if source == self._me:
            self._gradient_forms.pop(letter, None)
            return self._here.pop(letter)
        line = self._from[source]
        while letter not in line.posted:
            self._ask(line)
        tensor, work = line.posted.pop(letter)
        while len(line.posted) < _AHEAD and line.expected and self._form(line.expected[0]) is not None:
            self._ask(line)
        work.wait()
        return tensor

    def _form(self, letter: Letter) -> Form | None:
        if letter.kind == "B":
            return self._gradient_forms.get(letter)
        return self._forms.get((letter.to, self._key(letter)))

    def _ask(self, line: _Line) -> None:
        letter = line.expected.pop(0)
        form = self._form(letter)
        if form is None:
            header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64)  # on the CPU, so that no accelerator waits
            dist.recv(header, src=line.source, group=line.group)
            form = self._forms[letter.to, self._key(letter)] = _read(header)
        if letter.kind == "B":
            del self._gradient_forms[letter]
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        line.posted[letter] = (tensor, dist.irecv(tensor, src=line.source, group=line.group))

    def finish(self, turns_ago: int = 0) -> None:
        """Wait until everything has left that was sent in this turn or, with `turns_ago`, in older ones."""
        for turn, work, _ in self._sent:
            if turn <= self._turn - turns_ago:
                work.wait()
        self._sent = [each for each in self._sent if each[0] > self._turn - turns_ago]


def _header(tensor: Tensor) -> Tensor:
    """A tensor's dtype, number of dimensions, and sizes."""
    sizes = [*tensor.shape, *([0] * (_MOST_DIMS - tensor.ndim))]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *sizes], dtype=torch.int64)


def _read(header: Tensor) -> Form:
    dtype, dims, *sizes = header.tolist()
    return Form(shape=tuple(sizes[:dims]), dtype=_DTYPES[dtype])
