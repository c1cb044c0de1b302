"""`run.loss_chunk`: output layer and cross-entropy in chunks: the same step, less memory, and what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from proving import Case, prove, same
from small_tasks import Points
from tiny_models import DECODER, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.api import dry_run_layouts
from samestep.errors import LayoutError, UserError
from samestep.job import Job, Run
from samestep.parallel.loss.chunked_logits import ChunkedLogits, _logits, _Source, chunk_logits

WIDE = 4096


class Words(Points):
    """A decoder that predicts the next token, with some tokens masked unevenly."""

    def __init__(self, *, tied: bool = False, vocabulary: int = VOCABULARY, samples: int = 40) -> None:
        super().__init__()
        self.tied = tied
        self.vocabulary = vocabulary
        self.samples = samples

    def model(self) -> nn.Module:
        sizes = {**DECODER, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    def train_set(self) -> samestep.Samples:
        ids = torch.randint(self.vocabulary, (self.samples, 13), generator=torch.Generator().manual_seed(0))
        masked = torch.arange(13) >= 2 + torch.arange(self.samples)[:, None] % 11
        return list(zip(ids[:, :-1], ids.masked_fill(masked, -100)[:, 1:], strict=True))

    def eval_set(self) -> None:
        return None

    def collate(self, samples: Any) -> samestep.Batch:
        ids, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        return samestep.Batch({"input_ids": ids}, targets)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        logits = output.logits.flatten(0, 1).float() if output.logits.dtype == torch.bfloat16 else output.logits
        logits = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum"), (batch.targets != -100).sum()


class Squared(Words):
    """A loss that no cross-entropy computes."""

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return output.logits.square().sum(), len(output.logits)


def recipe(task: Any, **settings: Any) -> samestep.Recipe:
    given = {"batch": 10, "steps": 3, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2), **settings}
    return samestep.Recipe(task=task, **given)


def _in_chunks(layouts: Sequence[str], layouts_of_tied: Sequence[str]) -> dict[str, Case]:
    chunks: dict[str, Any] = {"loss_chunk": 7, "check": False}
    words, tied = recipe(Words()), recipe(Words(tied=True))
    cases: dict[str, Case] = {layout: (words, layout, {**chunks, "micro_batch": 3}) for layout in layouts}
    return cases | {f"{layout} tied": (tied, layout, chunks) for layout in layouts_of_tied}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_take_the_same_step_in_chunks() -> None:
    """The reference of a proof is one process with its logits whole. Also a loss with rows that ranks share."""
    cases = _in_chunks(["tp2"], ["fsdp2"])
    cases["a loss of its own"] = recipe(Own()), "cp2", {"check": False}
    assert same(prove(cases, steps=2), list(cases)) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_layouts_take_the_same_step_in_chunks() -> None:
    layouts = ["single", "dp2", "zero1x2", "zero2x2", "fsdp2", "fsdp2 recompute=full", "pp2", "cp2"]
    cases = _in_chunks(layouts, ["dp2", "tp2", "cp2"])
    assert same(prove(cases, steps=2), list(cases)) == {}


def test_the_loss_of_chunks_is_that_of_whole_logits_and_so_are_its_gradients() -> None:
    torch.manual_seed(0)
    whole, chunked = nn.Linear(6, 11).double(), nn.Linear(6, 11).double()
    chunked.load_state_dict(whole.state_dict())
    chunk_logits(chunked, 4)
    hidden, target = torch.randn(3, 6, 6, dtype=torch.float64), torch.randint(11, (3, 5))
    target[0] = -100

    def losses(layer: nn.Module, x: Tensor) -> list[Tensor]:
        logits = layer(x)[..., :-1, :]
        rows, flat = logits.contiguous().view(-1, 11), target.view(-1)
        weighted = F.cross_entropy(logits.flatten(0, 1), flat, torch.arange(11.0).double(), reduction="sum")
        return [
            F.cross_entropy(rows, flat),
            F.cross_entropy(rows, flat, label_smoothing=0.2),
            F.cross_entropy(rows[2:], flat[2:], reduction="none").square().sum(),
            nn.CrossEntropyLoss(reduction="sum")(logits.reshape(15, 11), flat),
            weighted,
        ]

    for number in range(5):
        inputs = [hidden.clone().requires_grad_() for _ in range(2)]
        found, expected = losses(chunked, inputs[0])[number], losses(whole, inputs[1])[number]
        for layer, loss in ((chunked, found), (whole, expected)):
            layer.zero_grad()
            loss.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        for mine, other in zip(chunked.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    """Of [tokens, classes]: in forward, in backward, and as a gradient."""
    largest: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            largest.extend(each.numel() for each in [found] if isinstance(each, Tensor))
            return found

    tokens, hidden, rows = 512, 8, 32
    sizes = {}
    for chunk in (None, rows):
        layer = nn.Linear(hidden, WIDE)
        if chunk:
            chunk_logits(layer, chunk)
        largest.clear()
        with Sizes():
            target = torch.zeros(tokens, dtype=torch.int64)
            F.cross_entropy(layer(torch.randn(tokens, hidden, requires_grad=True)), target).backward()
        sizes[chunk] = max(largest)
    assert sizes == {None: tokens * WIDE, rows: rows * WIDE}


@pytest.mark.slow
def test_what_a_step_keeps_falls_by_the_logits() -> None:
    """By the count of bytes that a training reports: cross-entropy keeps its logits' logarithms for backward."""
    vocabulary, samples = 16384, 32

    def peak(classes: int, chunk: int | None) -> int:
        job = recipe(Words(vocabulary=classes), batch=samples)
        return samestep.dry_run(job, loss_chunk=chunk, threads=1, check=False)[0].activations

    rest = peak(VOCABULARY, None)
    logits = samples * 12 * vocabulary * 4
    assert peak(vocabulary, None) - rest > 2.5 * logits
    assert peak(vocabulary, 16) - rest < 0.2 * logits


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "ranks"), [("cp2", 2), ("cp4 attention=ring", 4)])
def test_logits_and_loss_fall_with_the_ranks_of_context_parallel(layout: str, ranks: int) -> None:
    vocabulary, samples = 16384, 32
    layouts = ["single", layout]

    def peaks(classes: int) -> dict[str, int]:
        job = Job(recipe=recipe(Words(vocabulary=classes), batch=samples), run=Run(threads=1, check=False))
        return {layout: _most(usages) for layout, usages in dry_run_layouts(job, layouts).items()}

    small, large = peaks(VOCABULARY), peaks(vocabulary)
    of_logits = {layout: large[layout] - small[layout] for layout in layouts}
    assert of_logits["single"] > 2.5 * samples * 12 * vocabulary * 4
    assert of_logits[layout] == pytest.approx(of_logits["single"] / ranks, rel=0.1)


def _most(usages: Any) -> int:
    """The activations of the rank that has most of them."""
    assert not isinstance(usages, str), usages
    return max(usage.activations for usage in usages)


class Own(Words):
    """A loss with a function that PyTorch's modes and subclasses are not asked about, and one of all logits."""

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        squares = output.logits.logsumexp(-1).square().mean(-1).sum()
        output.logits = Doubled.apply(output.logits)
        loss, count = super().loss(output, batch)
        return loss + squares, count


class Doubled(torch.autograd.Function):
    """A function that PyTorch's modes and subclasses are not asked about, such as of a kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return 2 * logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradients[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shared_rows_take_the_same_step_on_four_ranks() -> None:
    cases: dict[str, Any] = {
        "a loss of its own, shards": (recipe(Own(tied=True)), "fsdp2 cp2", {"check": False}),
        "stages": (recipe(Words()), "pp2 cp2", {"check": False, "micro_batch": 3}),
    }
    assert same(prove(cases, steps=2), list(cases)) == {}


def _first_changed(logits: Tensor) -> Tensor:
    logits[..., 0] = -3.0
    return F.cross_entropy(logits.view(-1, 5), TARGETS)


TARGETS = torch.tensor([0, 1, 4, 3, 2, 2, 1, 0])
LOSSES: dict[str, Any] = {
    "as it is": lambda logits: F.cross_entropy(logits.view(-1, 5), TARGETS),
    "shifted": lambda logits: F.cross_entropy(logits.double()[:, :-1].reshape(-1, 5), TARGETS[:6]),
    "capped": lambda logits: F.cross_entropy(2 * torch.tanh(logits / 2).view(-1, 5), TARGETS),
    "weighted": lambda logits: F.cross_entropy(logits.view(-1, 5), TARGETS, torch.arange(1.0, 6.0)),
    "classes first": lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGETS.view(2, 4)),
    "in two goes": lambda logits: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), TARGETS),
    "and all of them": lambda logits: F.cross_entropy(logits.view(-1, 5), TARGETS) + logits.logsumexp(-1).sum(),
    "some classes": lambda logits: logits[..., :2].square().sum(),
    "changed in place": _first_changed,
    "by a function": lambda logits: F.cross_entropy(Doubled.apply(logits).view(-1, 5), TARGETS),
    "by a function of rows": lambda logits: F.cross_entropy(Doubled.apply(logits.view(-1, 5)), TARGETS),
    "without a gradient too": lambda logits: logits.square().mean() * float(logits.detach().argmax(-1).max() >= 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_logits_that_may_be_wanted_whole_give_the_same_loss_and_gradients(name: str) -> None:
    found: list[list[Any]] = []
    for shared in (True, False):
        torch.manual_seed(0)
        layer, hidden = nn.Linear(3, 5), torch.randn(2, 4, 3, requires_grad=True)
        source = _Source(inputs=hidden, layer=layer, classes=5, dtypes=(torch.float32,), rows=None)
        loss = LOSSES[name](_logits(source) if shared else layer(hidden))
        loss.backward()
        found.append([loss.detach(), hidden.grad, layer.weight.grad, layer.bias.grad])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_view_of_logits_that_are_changed_in_place_is_refused() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    logits = _logits(_Source(inputs=hidden, layer=nn.Linear(3, 5), classes=5, dtypes=(torch.float32,), rows=None))
    view = logits.reshape(2, 2, 5)
    logits[0] = 0.0
    assert logits[0].tolist() == [0.0] * 5
    with pytest.raises(UserError, match="logits are changed in place"):
        view.sum()


def test_what_else_wants_logits_is_refused_by_its_name() -> None:
    layer = nn.Linear(3, 5)
    chunk_logits(layer, 2)
    logits = layer(torch.randn(4, 3))
    assert isinstance(logits, ChunkedLogits)
    assert (logits.shape, logits.dtype, len(logits)) == ((4, 5), torch.float32, 4)
    uses: list[Any] = [
        lambda: logits.softmax(-1),
        lambda: logits[:, :2],
        lambda: logits[..., 0],
        lambda: logits.view(5, 4),
        lambda: logits + 1,
        lambda: torch.tanh(logits),
        lambda: F.cross_entropy(torch.randn(4, 5), logits),
    ]
    for use in uses:
        with pytest.raises(UserError, match=r"run\.loss_chunk is given, and .* wants the logits whole"):
            use()
    with pytest.raises(UserError, match="logits of 3 dimensions"):
        F.cross_entropy(layer(torch.randn(2, 4, 3)), torch.zeros(2, 3, dtype=torch.int64))
    with torch.no_grad():
        assert type(layer(torch.randn(4, 3))) is Tensor


@pytest.mark.parametrize(
    ("task", "layout", "run", "message"),
    [
        (Squared(), "single", {}, r'"square" wants the logits whole'),
        (Words(), "cp2 tp2", {}, r'layout "cp2 tp2": run.loss_chunk is 4, .* a layout with one of them'),
        (Points(), "single", {"engine": "data-parallel"}, r'loss_chunk is 4, which engine "data-parallel"'),
        (Points(), "single", {"loss_chunk": 0}, r"run.loss_chunk is 0"),
    ],
)
def test_what_cannot_be_computed_in_chunks_is_refused(task: Any, layout: str, run: Any, message: str) -> None:
    with pytest.raises((UserError, LayoutError), match=message):
        samestep.verify(recipe(task), layout, **{"loss_chunk": 4, "threads": 1, **run})
