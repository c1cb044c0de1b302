"""Random numbers that a forward draws: the same under every layout, and distributed as PyTorch's are."""

import math
from collections.abc import Callable

import drawing_nets as drawing
import odd_tasks as odd
import pytest
import torch
from proving import assert_same_steps
from torch import Tensor, nn

import samestep
from samestep.data.loader import Moment
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.forward_context import ForwardContext, Portion

SAMPLES = 20_000


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


def drawn(draw: Callable[[Tensor], Tensor], samples: Tensor, *, step: int = 0, columns: int = 3) -> Tensor:
    """What a model draws in a training forward of these samples."""
    forward_context, model = ForwardContext(), Draws(draw)
    same_dropout(model, forward_context)
    before = torch.get_rng_state()
    with forward_context.at(Moment(step=step, samples=samples, zero_weight=False)):
        found = model(torch.zeros(len(samples), columns))
    assert torch.equal(before, torch.get_rng_state())
    return found


@pytest.mark.parametrize("kind", ["rand", "dropout"])
def test_rows_that_are_joined_draw_what_each_sample_alone_draws(kind: str) -> None:
    """Samples of unlike numbers of rows, in one first dimension, as the nodes of graphs."""
    draws = {"rand": torch.rand_like, "dropout": lambda x: nn.functional.dropout(x + 1, 0.5)}

    def of(samples: list[int]) -> Tensor:
        rows = tuple(1 + number % 3 for number in samples)
        forward_context, model = ForwardContext(), Draws(draws[kind])
        same_dropout(model.train(), forward_context)
        moment = Moment(step=3, samples=torch.tensor(samples), zero_weight=False, splits=((1,) * len(samples), rows))
        with forward_context.at(moment):
            return model(torch.zeros(sum(rows), 4))

    together = of([4, 11, 6, 8])  # 2, 3, 1 and 3 rows: 9, and of the first and the third 3, as many as of the second
    assert torch.equal(together, torch.cat([of([4]), of([11]), of([6]), of([8])]))
    assert torch.equal(together[[0, 1, 5]], of([4, 6]))
    assert len(together.unique()) > 1


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "rand of a size": lambda x: torch.rand((len(x), 3)),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(*x.shape),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(2, 7, x.shape),
    "randint from 0": lambda x: torch.randint(7, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 2, 7),
    "bernoulli": lambda x: torch.bernoulli(x + 0.3),
    "bernoulli of a tensor": lambda x: (x + 0.3).bernoulli(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "uniform_": lambda x: x.clone().uniform_(-1, 3),
    "normal_": lambda x: x.clone().normal_(2, 0.5),
    "exponential_": lambda x: x.clone().exponential_(4.0),
    "normal": lambda x: torch.normal(x + 2, 0.5),
    "normal of a size": lambda x: torch.normal(2.0, 0.5, x.shape),
    "multinomial": lambda x: torch.multinomial(torch.tensor([[0.1, 0.2, 0.7]]).expand(len(x), 3), 1).float(),
    "multinomial with replacement": lambda x: torch.multinomial(
        torch.tensor([[0.1, 0.2, 0.7]]).expand(len(x), 3), 4, replacement=True
    ),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, hard=True),
    "a normal distribution": lambda x: torch.distributions.Normal(x + 2, 0.5).rsample(),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_distributed_as_pytorchs(name: str) -> None:
    """Mean and variance within 5 standard errors of PyTorch's own numbers, dtype, shape and range alike."""
    mine = drawn(KINDS[name], torch.arange(SAMPLES))
    torch.manual_seed(0)
    theirs = KINDS[name](torch.zeros(SAMPLES, 3))
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype
    a, b = mine.double(), theirs.double()
    error = math.sqrt(2) * b.std().item() / math.sqrt(b.numel())
    assert abs(a.mean() - b.mean()) < 5 * error
    assert abs(a.std() / b.std() - 1) < 0.03
    if not name.startswith(("normal", "randn", "exponential", "a normal")):
        assert a.min() == pytest.approx(b.min().item(), abs=1e-3 * (b.max() - b.min()).item())
        assert a.max() == pytest.approx(b.max().item(), abs=1e-3 * (b.max() - b.min()).item())


@pytest.mark.parametrize("name", KINDS)
def test_a_samples_numbers_are_its_own(name: str) -> None:
    samples = torch.arange(12)
    whole = drawn(KINDS[name], samples)
    parts = [drawn(KINDS[name], samples[:5]), drawn(KINDS[name], samples[5:])]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, drawn(KINDS[name], samples, step=1))


def test_columns_and_calls_are_independent() -> None:
    numbers = drawn(
        lambda x: torch.cat([torch.randn_like(x), torch.randn_like(x)], 1), torch.arange(SAMPLES)
    ).double()
    correlation = torch.corrcoef(numbers.T) - torch.eye(6)
    assert correlation.abs().max() < 5 / math.sqrt(SAMPLES)


def test_one_number_of_no_dimension_is_the_steps() -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.rand([])

    values = [drawn(draw, samples).item() for samples in (torch.arange(4), torch.arange(4, 9), torch.arange(1))]
    assert len(set(values)) == 1
    assert drawn(draw, torch.arange(4), step=1).item() != values[0]


@pytest.mark.parametrize("shape", [(1,), (5, 3), (1, 8)])
def test_a_draw_of_no_sample_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        samestep.UserError, match=r" at .*test_draws.py:\d+, in which .*each number's sample is unknown"
    ):
        drawn(lambda x: torch.rand(shape), torch.arange(4))


SHAPES = {"a sample": (3,), "tokens": (5, 3), "a pair": (2, 3), "heads of tokens": (2, 5, 3)}


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["uniform_", "dropout", "randn"])
def test_samples_may_be_another_dimension(kind: str, shape: tuple[int, ...], before: int) -> None:
    """As many samples as are in front of them, one, and more: each alone has its numbers of all."""

    def draw(x: Tensor) -> Tensor:
        size = (*(2, 4)[-before:], len(x), *shape)
        if kind == "randn":
            return torch.randn(size)
        return torch.zeros(size).uniform_() if kind == "uniform_" else nn.functional.dropout(torch.ones(size), 0.5)

    def of(*samples: int) -> Tensor:
        forward_context, model = ForwardContext(), samestep.draws_along(Draws(draw), before)
        same_dropout(model.train(), forward_context)
        with forward_context.at(Moment(step=2, samples=torch.tensor(samples), zero_weight=False)):
            return model(torch.zeros(len(samples), 1))

    together = of(4, 11, 6, 8, 2)
    assert together.unique().numel() > 1
    assert torch.equal(together, torch.cat([of(4), of(11), of(6, 8, 2)], dim=before))
    assert torch.equal(together.narrow(before, 1, 2), of(11, 6))


def test_a_rank_with_some_tokens_or_features_draws_those_of_the_whole() -> None:
    """Of [pair, samples, tokens, features], and of tokens in front of the samples."""

    def of(part: Portion, *shape: int) -> Tensor:
        forward_context = ForwardContext()
        model = samestep.draws_along(Draws(lambda x: torch.rand(shape)), 1)
        same_dropout(model, forward_context)
        moment = Moment(step=2, samples=torch.tensor([7, 1, 9]), zero_weight=False)
        with forward_context.at(moment), forward_context.holding(part):
            return model(torch.zeros(3, 1))

    whole = of(Portion(), 2, 3, 6, 8)
    assert torch.equal(whole[:, :, 4:], of(Portion(activations={1: 4}), 2, 3, 2, 8))
    assert torch.equal(whole[..., 5:], of(Portion(activations={-1: 5}), 2, 3, 6, 3))
    tokens_first = of(Portion(), 6, 3, 8)
    assert torch.equal(tokens_first[4:], of(Portion(activations={0: 4}), 2, 3, 8))


def test_modules_within_may_say_another_dimension() -> None:
    forward_context = ForwardContext()
    first, second = (Draws(lambda x, size=size: torch.rand(size)) for size in [(3, 5), (5, 3)])
    model = samestep.draws_along(nn.Sequential(samestep.draws_along(first, 0), second), 1)
    same_dropout(model, forward_context)
    with forward_context.at(Moment(step=2, samples=torch.tensor([7, 1, 9]), zero_weight=False)):
        assert model(torch.zeros(3, 1)).shape == (5, 3)


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((4,), 1, r"rand of shape \[4\], of which samestep.draws_along says that samples are dimension 1, which it"),
        ((2, 5), 1, r"rand of shape \[2, 5\] at .*the 4 samples of a micro-batch are not dimension 1, as samestep"),
        ((2, 4), 0, r"rand of shape \[2, 4\] at .*not the first dimension.*: samestep.draws_along\(module, dim\)"),
    ],
)
def test_a_dimension_that_has_not_the_samples_is_refused(shape: tuple[int, ...], dim: int, message: str) -> None:
    forward_context, model = ForwardContext(), samestep.draws_along(Draws(lambda x: torch.rand(shape)), dim)
    same_dropout(model, forward_context)
    with (
        forward_context.at(Moment(step=0, samples=torch.arange(4), zero_weight=False)),
        pytest.raises(samestep.UserError, match=message),
    ):
        model(torch.zeros(4, 1))


@pytest.mark.parametrize("dim", [-1, True, 1.0])
def test_a_dimension_of_samples_is_a_number_from_0(dim: int) -> None:
    with pytest.raises(samestep.UserError, match=r"draws_along\(dim=.*\): a dimension is counted from the first one"):
        samestep.draws_along(nn.Linear(2, 2), dim)


RUNS: list[tuple[str, dict[str, int]]] = [("dp2", {}), ("dp2", {"micro_batch": 3}), ("fsdp2", {}), ("pp2", {})]


def recipes(*nets: type[nn.Module]) -> list[samestep.Recipe]:
    optimizer = samestep.AdamW(lr=0.01)
    return [samestep.Recipe(task=odd.Odd(net), batch=13, steps=5, optimizer=optimizer) for net in nets]


def test_draws_take_the_same_step_under_layouts() -> None:
    """Each kind under another layout, and one in micro-batches."""
    by_sample = recipes(drawing.DropPath, drawing.NewEmptyDropPath, drawing.LayerDrop, drawing.Noisy)
    cases = [(recipe, layout, run) for recipe, (layout, run) in zip(by_sample, RUNS[::-1], strict=True)]
    elsewhere = recipes(drawing.SecondSamples, drawing.TokensFirst)
    cases += [(elsewhere[0], "dp2", {"micro_batch": 2}), (elsewhere[1], "dp2", {}), (elsewhere[1], "tp2", {})]
    assert_same_steps(cases, steps=3)


@pytest.mark.slow
def test_every_draw_takes_the_same_step_under_every_layout() -> None:
    every = recipes(
        *(drawing.DropPath, drawing.NewEmptyDropPath, drawing.LayerDrop, drawing.Noisy),
        *(drawing.SecondSamples, drawing.TokensFirst),
    )
    assert_same_steps([(recipe, layout, run) for recipe in every for layout, run in RUNS], steps=3)


@pytest.mark.slow
def test_a_model_that_begins_to_draw_takes_the_same_step() -> None:
    recipe = samestep.Recipe(task=odd.Odd(drawing.LateDropout), batch=13, steps=5, optimizer=samestep.AdamW(lr=0.01))
    layouts = [("dp2", {}), ("dp2", {"micro_batch": 3}), ("zero1x2", {}), ("fsdp2", {})]
    assert_same_steps([(recipe, layout, run) for layout, run in layouts], steps=4)
