"""Dropout drops the same elements under every layout, and they are as random as they should be."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import own_loops
import pytest
import torch
import torch.nn.functional as F
from own_loops import Case
from small_tasks import Points
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.data.loader import Moment, StepBatch
from samestep.data.order import SampleOrder
from samestep.engines.base import Loss, StepReport
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.exact.counter_rng import columns, draw, key_of, split, threshold
from samestep.parallel.exact.dropout import explicit_attention, same_dropout
from samestep.parallel.exact.forward_context import ForwardContext, Portion

BATCH, STEPS = 13, 7
MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def split_by_hand(key: int, position: int) -> int:
    """SplitMix64's child, in Python's own whole numbers."""
    mixed = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)


def number_by_hand(key: int, positions: list[int]) -> int:
    """A number of `draw`, from 0 to 2**32."""
    *outer, last = positions
    for position in outer:
        key = split_by_hand(key, position)
    mixed = (key & MASK_32) ^ (split_by_hand(0, last) & MASK_32)
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & MASK_32
    mixed ^= key >> 32
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & MASK_32
    return mixed ^ (mixed >> 16)


def mask_by_hand(step: int, samples: list[int], site: tuple[str, int], shape: list[int], p: float) -> Tensor:
    """Zeros and 1 / (1 - p): [samples, *shape], as a function of the seed 0 and what is given."""
    mask = torch.zeros(len(samples), *shape, dtype=torch.float64)
    for row, sample in enumerate(samples):
        key = split_by_hand(split_by_hand(key_of("dropout", 0, step) & MASK_64, sample), key_of(*site) & MASK_64)
        for position in torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape)).tolist():
            number = number_by_hand(key, position)
            # PyTorch compares the same bits as signed numbers.
            signed = number - 2**32 if number >= 2**31 else number
            if signed >= p * 2**32 - 2**31:
                mask[(row, *position)] = 1 / (1 - p)
    return mask


class Block(nn.Module):
    """Dropout as a module and as a function, of elements and of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:  # [samples, 6]
        hidden = self.drop(torch.tanh(self.linear(hidden)))
        channels = F.dropout1d(hidden.view(-1, 3, 2), 0.25, self.training)
        return F.dropout(channels.flatten(1), 0.2, self.training)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.dropout(self.first(inputs), 0.1, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(F.dropout(hidden, 0.4, self.training))


class ByHand(Dropping):
    """The same with its masks written out; it is called once a step, with the whole batch."""

    def __init__(self, *, shift: int = 0) -> None:
        super().__init__()
        self.order = SampleOrder(size=31, batch=BATCH, seed=0)
        self.step, self.shift = 0, shift

    def forward(self, inputs: Tensor) -> Tensor:
        samples = [sample + self.shift for sample in self.order.global_batch(self.step).tolist()]

        def mask(name: str, number: int, shape: list[int], p: float) -> Tensor:
            return mask_by_hand(self.step, samples, (name, number), shape, p)

        hidden = self.first(inputs) * mask("", 0, [6], 0.1)
        for number, block in enumerate(self.blocks):
            name = f"blocks.{number}"
            assert isinstance(block, Block)
            hidden = torch.tanh(block.linear(hidden)) * mask(f"{name}.drop", 0, [6], 0.3)
            hidden = (hidden.view(-1, 3, 2) * mask(name, 0, [3, 1], 0.25)).flatten(1) * mask(name, 1, [6], 0.2)
        hidden = hidden * mask("", 1, [6], 0.4)
        self.step += 1
        return self.last(hidden)


class Dropped(Points, own_loops.Looped):
    def model(self) -> nn.Module:
        return Dropping()


class ByRankTrainer(NativeTrainer):
    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """The mistake: masks by the sample's place in its micro-batch, as a generator on each rank would have it."""
        micro_batches = [
            replace(each, moment=replace(each.moment, samples=torch.arange(len(each.moment.samples))))
            for each in batch.micro_batches
        ]
        return super().step(replace(batch, micro_batches=micro_batches), loss)


class ByRank(Native):
    trainer_class = ByRankTrainer


def test_masks_are_those_of_a_plain_loop_under_every_layout() -> None:
    task = Dropped(samples=31)
    torch.manual_seed(0)
    weights = Dropping().state_dict()

    def by_hand(shift: int) -> own_loops.Taken:
        model = ByHand(shift=shift)
        model.load_state_dict(weights)
        return own_loops.plain(task, batch=BATCH, steps=STEPS, model=model)

    expected = by_hand(0)
    assert own_loops.far(by_hand(1), expected) > 1e-2
    alone = [Case(), Case(micro_batch=4), Case(layout="single recompute=full", micro_batch=5)]
    two = [
        Case(layout="dp2", micro_batch=3),
        Case(layout="dp2 recompute=full", micro_batch=2),
        Case(layout="fsdp2 recompute=selective"),
        Case(layout="zero1x2"),
        Case(layout="dp2", engine=ByRank()),
    ]
    taken = [own_loops.take(case, task, BATCH, STEPS) for case in alone]
    taken += own_loops.under(two, task, batch=BATCH, steps=STEPS, ranks=2)
    for case, each in zip([*alone, *two], taken, strict=True):
        apart = own_loops.far(each, expected)
        assert apart > 1e-3 if isinstance(case.engine, ByRank) else apart < 1e-10, (case, apart)


def test_the_proof_has_dropout_where_it_is_asked_for() -> None:
    recipe = samestep.Recipe(task=Points(samples=31, dropout=0.5), batch=BATCH, steps=4)
    assert samestep.verify(recipe, micro_batch=5, dropout=True).same_step
    assert samestep.verify(recipe, micro_batch=5, engine=ByRank()).same_step
    assert not samestep.verify(recipe, micro_batch=5, engine=ByRank(), dropout=True).same_step
    without = replace(recipe, dropout=False)
    assert samestep.verify(without, micro_batch=5, engine=ByRank(), dropout=True).same_step


def moment(*samples: int, step: int = 0, seed: int = 0) -> Moment:
    return Moment(step=step, samples=torch.tensor(samples), zero_weight=False, seed=seed)


def dropped(
    model: nn.Module, when: Moment, *inputs: Tensor, part: Portion | None = None, attention: bool = True
) -> Any:
    forward_context = ForwardContext()
    same_dropout(model.train(), forward_context, attention=attention)
    with forward_context.at(when), forward_context.holding(part or Portion()):
        return model(*inputs)


class Call(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def test_a_mask_depends_on_each_of_what_it_should_and_on_no_size() -> None:
    drop = Call(lambda inputs: F.dropout(inputs, 0.5))
    whole = dropped(drop, moment(5, 9, 2), torch.ones(3, 10, 16))
    torch.testing.assert_close(dropped(drop, moment(9, 5), torch.ones(2, 10, 16)), whole[[1, 0]])
    # Padded to another length, and with batch and tokens in one dimension.
    torch.testing.assert_close(dropped(drop, moment(5, 9, 2), torch.ones(3, 7, 16)), whole[:, :7])
    torch.testing.assert_close(dropped(drop, moment(5, 9, 2), torch.ones(30, 16)), whole.flatten(0, 1))
    for other in (moment(5, 9, 2, step=1), moment(5, 9, 2, seed=1)):
        assert not torch.equal(dropped(drop, other, torch.ones(3, 10, 16)), whole)


def test_a_rank_that_computes_a_part_has_the_mask_of_that_part() -> None:
    drop = Call(lambda inputs: F.dropout(inputs, 0.5))
    whole = dropped(drop, moment(5, 9), torch.ones(2, 10, 16))
    right = dropped(drop, moment(5, 9), torch.ones(2, 10, 8), part=Portion(activations={-1: 8}))
    torch.testing.assert_close(right, whole[..., 8:])
    ends = Portion(activations={1: torch.tensor([0, 9])})
    torch.testing.assert_close(dropped(drop, moment(5, 9), torch.ones(2, 2, 16), part=ends), whole[:, [0, 9]])
    query, key, value = torch.randn(3, 2, 4, 5, 6).unbind()
    attention = Call(lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.5))
    heads = dropped(attention, moment(5, 9), query, key, value)
    second = dropped(attention, moment(5, 9), query[:, 2:], key[:, 2:], value[:, 2:], part=Portion(attention={1: 2}))
    torch.testing.assert_close(second, heads[:, 2:])


def test_random_numbers_are_uniform_and_independent() -> None:
    """Chi-squared of the leading and the trailing byte, and correlations between whatever differs in one thing."""
    keys = split(
        torch.tensor([key_of("a", 0), key_of("a", 1)])[:, None], torch.arange(32)
    ).flatten()  # steps, samples
    numbers = draw(keys, [torch.arange(24)], columns(torch.arange(384)))  # [64, 24, 384]
    count = numbers.numel()
    for shift in (0, 12, 24):
        seen = torch.bincount(((numbers >> shift) & 0xFF).flatten(), minlength=256).double()
        chi = ((seen - count / 256) ** 2 / (count / 256)).sum().item()
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), (shift, chi)
    for p in (0.1, 0.5, 0.9):
        low = (numbers < threshold(p)).double()
        assert abs(low.mean().item() - p) < 5 * math.sqrt(p * (1 - p) / count)
        deviation = (low - p) / math.sqrt(p * (1 - p))  # of mean 0 and variance 1
        pairs = {
            "steps": deviation[:32] * deviation[32:],
            "samples": deviation[1:] * deviation[:-1],
            "rows": deviation[:, 1:] * deviation[:, :-1],
            "neighbours": deviation[..., 1:] * deviation[..., :-1],
            "halves": deviation[..., :192] * deviation[..., 192:],
            # Four corners of a rectangle: what a sum of a row's and a column's number would give away.
            "corners": deviation[:, 1:, 1:] * deviation[:, :-1, 1:] * deviation[:, 1:, :-1] * deviation[:, :-1, :-1],
        }
        for name, products in pairs.items():
            assert abs(products.mean().item()) < 5 / math.sqrt(products.numel()), (p, name)


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Callable[..., Tensor]) -> None:
    inputs = torch.randn(400, 500)
    out = dropped(Call(lambda x: function(x, 0.3, True)), moment(*range(400)), inputs)
    assert abs(out.mean().item()) < 0.02
    assert abs(out.std().item() - 1) < 0.02
    rounded = out.round(decimals=4)
    assert (
        0.25 < (rounded == rounded.flatten().mode().values).double().mean().item() < 0.35
    )  # what is dropped is alike


def test_in_place_dropout_is_in_place() -> None:
    inputs = torch.ones(4, 50)
    out = dropped(nn.Dropout(0.5, inplace=True), moment(1, 2, 3, 4), inputs)
    assert out is inputs
    assert sorted(out.unique().tolist()) == [0.0, 2.0]


def attention_inputs(heads: int = 4) -> list[Tensor]:
    return [torch.randn(3, count, 5, 6, dtype=torch.float64) for count in (4, heads, heads)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.rand(3, 1, 5, 5) > 0.4},
        {"attn_mask": torch.tensor([[False] * 5, *[[True, False, True, True, False]] * 4])},  # one sees nothing
        {"attn_mask": torch.randn(5, 5, dtype=torch.float64).masked_fill(torch.eye(5) > 0, -math.inf)},
        {"enable_gqa": True},
    ],
)
def test_attention_written_out_is_pytorchs(options: dict[str, Any]) -> None:
    tensors = [each.requires_grad_() for each in attention_inputs(2 if "enable_gqa" in options else 4)]
    query, key, value = tensors
    mine = explicit_attention(query, key, value, **options, drop=lambda weights: weights)
    theirs = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_inside_multi_head_attention_is_ours(weights: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.attention(inputs, inputs, inputs, need_weights=weights)[0]

    model, inputs = Attends(), torch.randn(3, 5, 6)
    whole = dropped(model, moment(7, 8, 9), inputs)
    torch.testing.assert_close(dropped(model, moment(8, 9), inputs[1:]), whole[1:])
    assert not torch.allclose(dropped(model, moment(7, 8, 9, step=1), inputs), whole)
    assert not torch.allclose(model(inputs), whole)  # no training step: PyTorch's own


class Attending(nn.Module):
    """Dropout of attention's weights, and of what attention gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.kind = kind

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "function":
            query = inputs.unflatten(-1, (2, 4)).transpose(1, 2)  # [samples, heads, tokens, 4]
            given = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5 if self.training else 0.0)
            given = given.transpose(1, 2).flatten(-2)
        else:
            given, _ = self.attention(inputs, inputs, inputs, need_weights=self.kind == "weights")
        return torch.stack([given, F.dropout(torch.ones_like(given), 0.5, self.training)])


@pytest.mark.parametrize("kind", ["function", "module", "weights"])
def test_attention_alone_can_be_left_whole_and_other_masks_stay(kind: str) -> None:
    model, inputs = Attending(kind), torch.randn(3, 5, 8)
    dropping, mask = dropped(model, moment(7, 8, 9), inputs)
    whole, same_mask = dropped(model, moment(7, 8, 9), inputs, attention=False)
    assert torch.equal(mask, same_mask)
    model.eval()
    torch.testing.assert_close(whole, model(inputs)[0])
    assert not torch.allclose(dropping, whole)


def test_attention_without_dropout_runs_flash_attention() -> None:
    from torch.profiler import ProfilerActivity, profile

    def kernels(attention: bool) -> set[str]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            dropped(Attending("function"), moment(7, 8, 9), torch.randn(3, 5, 8), attention=attention)
        return {event.key for event in seen.key_averages() if "attention" in event.key}

    assert any("flash" in name for name in kernels(attention=False))
    assert not kernels(attention=True)


def test_outside_of_training_nothing_is_dropped_and_outside_of_steps_nothing_changes() -> None:
    model = Dropping()
    inputs = torch.randn(4, 4)
    evaluated = model.eval()(inputs)
    same_dropout(model, ForwardContext())
    assert torch.equal(model(inputs), evaluated)
    torch.manual_seed(3)
    first = model.train()(inputs)
    torch.manual_seed(3)
    assert torch.equal(Dropping.forward(model, inputs), first)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Recurrent(), r"recurrent \(LSTM\) draws its dropout inside PyTorch's kernel"),
        (
            nn.TransformerEncoderLayer(4, 2, 8),
            r"the model \(TransformerEncoderLayer\) drops elements of \[tokens, ba",
        ),
    ],
)
def test_what_cannot_be_reached_is_refused_at_the_start(model: nn.Module, message: str) -> None:
    with pytest.raises(samestep.UserError, match=f"{message}.*recipe.dropout: false"):
        same_dropout(model, ForwardContext())
    from samestep.training.evaluation import switch_off

    switch_off(model)
    same_dropout(model, ForwardContext())


@pytest.mark.parametrize("shape", [(5, 3, 8), (7, 8), (6, 3, 8)])
def test_a_tensor_whose_samples_cannot_be_found_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(samestep.UserError, match=r"the 3 samples of a micro-batch are not the first dimension"):
        dropped(Call(lambda inputs: F.dropout(inputs, 0.5)), moment(1, 2, 3), torch.ones(shape))


def test_as_many_tokens_as_samples_are_no_doubt_of_what_is_folded() -> None:
    """Heads in the first dimension: [samples x heads, tokens, tokens or features]."""
    model = Call(lambda inputs: F.dropout(inputs, 0.5))
    forward_context = ForwardContext()
    same_dropout(model.train(), forward_context)

    def mask(when: Moment, *shape: int) -> Tensor:
        with forward_context.at(when):
            return model(torch.ones(shape))

    some, few = moment(5, 9, 2), moment(9, 2)
    square = mask(some, 6, 3, 3)
    torch.testing.assert_close(mask(few, 4, 3, 3), square[2:])
    # It has been seen where there was no doubt, so that it is known where there might be.
    torch.testing.assert_close(mask(some, 6, 3, 8)[2:], mask(few, 4, 3, 8))


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = Call(lambda inputs: checkpoint(model.inner, inputs, use_reentrant=False))
    model.inner = inner
    out = dropped(model, moment(1, 2), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(samestep.UserError, match=r"inner.1: the model recomputes this dropout in backward by itself"):
        out.sum().backward()
