"""Tensor parallel: slices take the step of one process, tokens split or whole, beside every kind of data ranks."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import own_layers as own
import pytest
import torch
from model_tasks import NextWord
from proving import Case, prove, same
from small_tasks import Points
from tiny_texts import Averaged, Decoder, Encoder, Texts, WeighingBlocks, bert, bloom, gpt2, llama
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import samestep
from samestep.data.loader import StepBatch
from samestep.engines.base import Loss, Preparation, StepReport
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.layout import ModelShape
from samestep.parallel import collectives
from samestep.parallel.sharding import Part
from samestep.parallel.tensor import apply, plan
from samestep.verification.proof import Proof


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    settings = {"batch": 10, "steps": 9, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=task, **{**settings, **values})


class Perceptron(Points):
    """Seven hidden features, which two ranks can't have alike."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3))


class Weight(nn.Module):
    """A matrix of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Product(Points):
    """No layer that could be sliced."""

    def model(self) -> nn.Module:
        return Weight()


class Convolutions(Points):
    """Convolutions with norms and parametrizations in between, whose channels two ranks can't have alike."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 5, 3, padding=1, padding_mode="circular"),
            nn.GroupNorm(1, 5),
            nn.ConvTranspose1d(5, 7, 2, stride=2),
            nn.SiLU(),
            parametrizations.weight_norm(nn.Conv1d(7, 4, 3)),
            parametrizations.spectral_norm(nn.Conv1d(4, 4, 1)),
            nn.Flatten(),
            nn.Linear(24, 3),
        )


class OwnLayers(Points):
    """Layers and a gate of one's own: a pair of them, or each with a gather of its outputs."""

    def __init__(self, *, pair: bool) -> None:
        super().__init__()
        self._pair = pair

    def model(self) -> nn.Module:
        if self._pair:
            return nn.Sequential(own.Product(4, 10), own.Gate(), own.Product(5, 3))
        return nn.Sequential(own.Product(4, 5), nn.LayerNorm(5), own.Swish(), own.Product(5, 3, bias=False))


class Computed(Points):
    """Layers whose weights are computed from all of their parameters, and no others."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.orthogonal(nn.Linear(4, 6)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(6, 3))
        )


class OwnHeads(nn.Module):
    """An attention that knows its heads by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = [layer(x).view(batch, tokens, self.h, 4).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return x + self.out(attended.transpose(1, 2).reshape(batch, tokens, 16))


class Attending(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(OwnHeads(), OwnHeads())  # pyright: ignore

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids)).mean(1))


class Masked(Texts):
    """A loss that multiplies what cross-entropy gives by a mask, which slices of logits can't be."""

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        entropy = nn.functional.cross_entropy(output.logits.transpose(1, 2), batch.targets, reduction="none")
        mask = batch.targets >= 0  # [batch, tokens]
        return (entropy * mask).sum(), mask.sum()


class Fixed(Texts):
    """Four heads, as the task can say before anything is built."""

    def shape(self) -> ModelShape:
        return ModelShape(heads=4, key_value_heads=2)


class TwiceAdded(Native):
    """Each rank adds the bias of its row layers before the sum."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        for name, module in model.named_modules():
            if name.endswith("output.dense"):
                module.register_forward_hook(lambda linear, _, output: output + linear.bias)
        return trainer


class Crooked(Native):
    """Ranks whose heads begin in the middle of one. With the first look at the output, or without."""

    def __init__(self, *, looks: bool) -> None:
        self.looks = looks

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        straight = plan.even_ranges

        def crooked(pieces: Any, parts: int, step: int = 1) -> Any:
            ranges = straight(pieces, parts, step)
            if step == 1:
                return ranges
            (_, middle), (_, last) = ranges[0][-1], ranges[1][-1]
            first = ranges[0][-1][0]
            ranges[0][-1:] = [(first + 1, middle + 1)]
            ranges[1][-1:] = [(first, first + 1), (middle + 1, last)]
            return ranges

        with mock.patch.object(plan, "even_ranges", crooked):
            if self.looks:
                return super().prepare(model, how)
            with mock.patch.object(apply.SliceComparison, "hold", return_value=None):
                return super().prepare(model, how)


class NotSummed(Native):
    """Norms whose gradient is that of one rank's tokens."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        table = trainer._spread.parts.table
        table.update({name: Part(slice=part.slice) for name, part in table.items()})
        return trainer


class OneWayTrainer(NativeTrainer):
    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        with mock.patch.object(collectives, "copy_to_region", lambda x, group: x):
            return super().step(batch, loss)


class OneWay(Native):
    """The gradient of what column layers take is that of one rank's columns."""

    trainer_class = OneWayTrainer


BERT = recipe(Texts(bert))
LLAMA = recipe(Texts(llama, causal=True))
ATTENDING = recipe(Texts(Attending))
BLOOM = recipe(Texts(bloom, causal=True))
TIED = recipe(Texts(partial(llama, tie_word_embeddings=True), causal=True))
GPT2 = recipe(Texts(gpt2, causal=True))
WEIGHING = recipe(Texts(partial(WeighingBlocks, causal=False), causal=True))
WEIGHING_BEFORE = recipe(Texts(partial(WeighingBlocks, causal=True), causal=True))
ENCODER = recipe(Texts(Encoder))

SAME: dict[str, tuple[samestep.Recipe, str, dict[str, Any]]] = {
    "BERT": (BERT, "tp2", {}),
    "BERT, tokens split": (BERT, "tp2 sequence=split", {"micro_batch": 3}),
    "GPT-2": (GPT2, "tp2 recompute=full", {}),
    "GPT-2, tokens split": (GPT2, "tp2 sequence=split recompute=selective", {}),
    "Llama": (LLAMA, "tp2", {"micro_batch": 4}),
    "Llama, tokens split": (LLAMA, "tp2 sequence=split recompute=full", {}),
    "Llama, tied": (TIED, "tp2", {}),
    "Llama, tied, tokens split": (TIED, "tp2 sequence=split", {}),
    "Llama, another loss": (recipe(Masked(llama, causal=True)), "tp2", {}),
    "PyTorch's encoder": (ENCODER, "tp2", {}),
    "PyTorch's encoder, tokens split": (ENCODER, "tp2 sequence=split", {}),
    "PyTorch's encoder, tokens first": (recipe(Texts(partial(Encoder, batch_first=False))), "tp2 sequence=split", {}),
    "PyTorch's decoder": (recipe(Texts(Decoder, causal=True)), "tp2", {}),
    "PyTorch's decoder, tokens split": (recipe(Texts(Decoder, causal=True)), "tp2 sequence=split", {}),
    "an attention's weights": (recipe(Texts(Averaged)), "tp2", {}),
    "Llama, one key-value head": (recipe(Texts(partial(llama, num_key_value_heads=1), causal=True)), "tp2", {}),
    "Llama, one key-value head, tokens split": (
        recipe(Texts(partial(llama, num_key_value_heads=1), causal=True)),
        "tp2 sequence=split",
        {},
    ),
    # A projection laid out by heads and a bias of heads: they must be sliced where the user says so.
    "Bloom's attention": (
        BLOOM,
        "tp2",
        {"tensor_plan": {"*.query_key_value": "column", "*.self_attention.dense": "row"}},
    ),
    "Bloom, tokens split": (BLOOM, "tp2 sequence=split", {}),
    "three heads, left whole": (
        recipe(Texts(partial(bert, hidden_size=12, num_attention_heads=3))),
        "tp2 sequence=split",
        {},
    ),
    "heads cut in the middle, left whole": (BERT, "tp2", {"engine": Crooked(looks=True)}),
    "layers alone": (recipe(Points()), "tp2", {}),
    "computed weights, left whole": (recipe(Computed()), "tp2", {}),
    "layers of one's own": (recipe(OwnLayers(pair=True)), "tp2", {}),
    "layers of one's own, alone": (recipe(OwnLayers(pair=False)), "tp2", {}),
    "convolutions": (recipe(Convolutions()), "tp2", {}),
    "a perceptron": (recipe(Perceptron()), "tp2", {}),
    "a part left whole": (BERT, "tp2", {"tensor_plan": {"*.attention.*": "whole", "*embeddings": "whole"}}),
    "a plan of one's own": (recipe(Points()), "tp2", {"tensor_plan": {"0": "whole", "4": "vocabulary"}}),
}

# What fast tests prove in another case: of another model, or without an option.
MORE = (
    "BERT",
    "GPT-2",
    "GPT-2, tokens split",
    "Llama",
    "Llama, tokens split",
    "Llama, tied",
    "Llama, another loss",
    "PyTorch's encoder",
    "PyTorch's encoder, tokens split",
    "PyTorch's encoder, tokens first",
    "PyTorch's decoder",
    "PyTorch's decoder, tokens split",
    "an attention's weights",
    "Llama, one key-value head",
    "Llama, one key-value head, tokens split",
    "Bloom's attention",
    "Bloom, tokens split",
    "three heads, left whole",
    "heads cut in the middle, left whole",
    "layers alone",
    "a perceptron",
    "a part left whole",
)

OTHER = {
    "a bias added twice": (BERT, "tp2", {"engine": TwiceAdded()}),
    "heads cut in the middle": (BERT, "tp2", {"engine": Crooked(looks=False)}),
    "norms not summed": (BERT, "tp2 sequence=split", {"engine": NotSummed()}),
    "gradients not summed": (LLAMA, "tp2", {"engine": OneWay()}),
}
MORE_OTHER = ("a bias added twice",)  # the layer's output is another one, as where heads are cut

REFUSED: dict[str, tuple[tuple[samestep.Recipe, str, dict[str, Any]], str]] = {
    "nothing to slice": ((recipe(Product()), "tp2", {}), "nothing of Weight can be sliced"),
    "no tokens": ((recipe(Perceptron()), "tp2 sequence=split", {}), "Sequential has neither a list of blocks"),
    "an unknown name": (
        (BERT, "tp2", {"tensor_plan": {"encoder.layers.*": "whole"}}),
        'run.tensor_plan: the model has no linear layer, table or attention called "encoder.layers.*"; it has bert.',
    ),
    "another kind of layer": (
        (BERT, "tp2", {"tensor_plan": {"*.word_embeddings": "row"}}),
        'word_embeddings (Embedding) can\'t be "row"; it can be vocabulary, whole',
    ),
    "a column alone": (
        (BERT, "tp2", {"tensor_plan": {"classifier": "column"}}),
        'classifier can\'t be "column": no row layer takes what it makes',
    ),
    "another output": (
        (recipe(Points()), "tp2", {"tensor_plan": {"0": "column", "4": "row"}}),
        "1 (LayerNorm) fails (RuntimeError: Given normalized_shape=[16], expected input with shape",
    ),
}


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    few = {name: case for name, case in SAME.items() if name not in MORE}
    other = {name: case for name, case in OTHER.items() if name not in MORE_OTHER}
    return prove({**few, **other, **{name: case for name, (case, _) in REFUSED.items()}}, steps=2)


@pytest.mark.parametrize("name", [name for name in SAME if name not in MORE])
def test_slices_take_the_step_of_one_process(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert not same(proofs, [name])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slices_of_more_models_take_the_step_of_one_process() -> None:
    assert not same(prove({name: SAME[name] for name in MORE}, steps=2), MORE)


@pytest.mark.parametrize("name", [name for name in OTHER if name not in MORE_OTHER])
def test_a_mistake_is_seen(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert_other_step(proofs[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_OTHER)
def test_more_mistakes_are_seen(name: str) -> None:
    assert_other_step(prove({name: OTHER[name]}, steps=2)[name])


def assert_other_step(proof: Proof | str) -> None:
    assert isinstance(proof, Proof), proof
    assert not proof.same_step, proof


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sliced_is_refused_in_one_line(proofs: Mapping[str, Proof | str], name: str) -> None:
    message = proofs[name]
    assert isinstance(message, str), message
    assert REFUSED[name][1] in message
    assert "\n" not in message


BESIDE: dict[str, tuple[samestep.Recipe, str, dict[str, Any]]] = {
    # Of other sizes on every rank, parameters are dealt out otherwise.
    "ZeRO-1 of uneven slices": (
        recipe(NextWord(kind="odd-gpt2", layers=3)),
        "zero1x2 tp2 sequence=split",
        {"micro_batch": 2},
    ),
    "shards": (TIED, "fsdp2 tp2", {"micro_batch": 2}),
    "stages of a pipeline, tokens split": (GPT2, "pp2 tp2 sequence=split recompute=full", {}),
}
# What each adds is proved above or in other files: another model, whole tokens beside split ones, recomputation.
MORE_BESIDE: dict[str, tuple[samestep.Recipe, str, dict[str, Any]]] = {
    "replicas": (LLAMA, "dp2 tp2", {"micro_batch": 2}),
    "another order": (LLAMA, "dp2 tp2 sequence=split order=spread", {}),
    "ZeRO-1": (GPT2, "zero1x2 tp2", {}),
    "ZeRO-2": (ENCODER, "zero2x2 tp2", {}),
    "shards offloaded": (LLAMA, "fsdp2 tp2 sequence=split offload=parameters", {}),
    "shards, tokens split": (BERT, "fsdp2 tp2 sequence=split recompute=full", {}),
    "parts of the tokens": (LLAMA, "cp2 tp2", {}),
    "parts of the tokens, split again": (BERT, "cp2 tp2 sequence=split", {}),
    "parts of the tokens, PyTorch's attention": (WEIGHING, "cp2 tp2", {}),
    "parts of the tokens, PyTorch's attention with a mask": (WEIGHING_BEFORE, "cp2 tp2", {}),
    "four slices of two key-value heads": (LLAMA, "tp4", {}),
    "four slices": (BERT, "tp4", {}),
    "four slices, tokens split": (GPT2, "tp4 sequence=split", {}),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cases", [BESIDE, MORE_BESIDE], ids=["few", "more"])
def test_slices_beside_data_ranks_take_the_step_of_one_process(cases: Mapping[str, Case]) -> None:
    assert not same(prove(cases, steps=2), list(cases))


@pytest.mark.parametrize(
    ("layout", "values", "message"),
    [
        ("tp3", {}, 'layout "tp3": 4 attention heads are not divisible by 3; use tp1, tp2 or tp4'),
        ("dp2 sequence=split", {}, "sequence=split is for the ranks of tensor parallel; use tp2 sequence=split"),
    ],
)
def test_sizes_and_options_are_checked_before_any_rank_starts(
    layout: str, values: dict[str, Any], message: str
) -> None:
    with mock.patch("samestep.launch.local.start") as start, pytest.raises(samestep.LayoutError) as error:
        samestep.train(recipe(Fixed(llama, causal=True), **values), layout=layout)
    assert message in str(error.value)
    start.assert_not_called()


def test_a_role_that_is_none_is_refused() -> None:
    with pytest.raises(samestep.UserError, match=r"run\.tensor_plan\.lm_head.*diagonal"):
        samestep.verify(LLAMA, "tp2", tensor_plan={"lm_head": "diagonal"})


def test_what_is_left_whole_is_said_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert samestep.verify(ATTENDING, layout="tp2", threads=1).same_step
    said = capfd.readouterr().err
    names = ", ".join(f"encoder.*.{name}" for name in ("q", "k", "v", "out"))
    assert f"every rank has all of {names}, since it fails (RuntimeError: shape '[" in said
    assert "(a view with -1 for the number of heads takes any number of them)" in said
