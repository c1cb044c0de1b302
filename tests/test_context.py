"""Context parallel: tokens split over ranks, and the same step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from proving import Case, prove, same
from tiny_models import Tiny
from torch import nn

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.verification.proof import Proof


def recipe(name: str, **values: Any) -> samestep.Recipe:
    settings = {"batch": 10, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=Tiny(name=name), **{**settings, **values})


class Unsummed(Native):
    """Gradients of the blocks that nobody adds up."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        trainer._spread.parts.table.clear()
        return trainer


class Widths(Native):
    """Notes the longest sequence that a block's first linear saw, and asks that it was a part."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        linear = model.get_submodule("model.layers.0.mlp.gate_proj")
        linear.register_forward_hook(lambda _, arguments, __: _at_most(arguments[0].shape[1], 6))
        return trainer


def _at_most(tokens: int, most: int) -> None:
    if tokens > most:
        raise AssertionError(f"{tokens} tokens on rank {dist.get_rank()}")


SAME: Mapping[str, Case] = {
    "bert": (recipe("bert"), "cp2", {}),
    "llama": (recipe("llama"), "cp2", {"micro_batch": 4}),
    "heads that are no multiple of the ranks": (recipe("qwen3"), "cp3", {}),
    "gpt2": (recipe("gpt2"), "fsdp2 cp2 recompute=full", {}),
    "vit": (recipe("vit"), "dp2 cp2", {}),
    "cross-attention, and relative positions that blocks hand on": (recipe("t5"), "cp2", {}),
    "nn.MultiheadAttention, which gets all tokens": (recipe("encoder"), "cp3 recompute=full", {"micro_batch": 4}),
    "a bias of as many tokens as a layer sees": (recipe("umt5"), "cp2", {}),
    "a softmax over tokens and a sink": (recipe("gpt-oss"), "cp2", {}),
    "layers of two classes, one with a state that runs over tokens": (recipe("jamba"), "cp2", {}),
    "stages of a pipeline, which recompute": (recipe("llama"), "pp2 cp2 recompute=full", {"micro_batch": 2}),
    "stages of an encoder and a decoder": (recipe("t5"), "pp2 cp2", {}),
    "a rank works on its part of the tokens": (  # 11 tokens at most
        recipe("llama"),
        "cp2",
        {"engine": Widths(), "micro_batch": 4},
    ),
}
# Keys and values that travel from rank to rank: causal, padded, and of both with a mask that hides each other.
RING: Mapping[str, Case] = {
    "ring: bert": (recipe("bert"), "cp2 attention=ring", {}),
    "ring: llama": (recipe("llama"), "cp2 attention=ring", {"micro_batch": 4}),
    "ring: llama, four ranks": (recipe("llama"), "cp4 attention=ring", {}),
    "ring: heads that are no multiple of the ranks": (recipe("qwen3"), "cp3 attention=ring", {}),
    "ring: gpt2": (recipe("gpt2"), "fsdp2 cp2 attention=ring recompute=full", {}),
    "ring: vit": (recipe("vit"), "dp2 cp2 attention=ring", {}),
    "ring: a bias with a gradient": (recipe("umt5"), "cp2 attention=ring", {}),
    "ring: cross-attention, and relative positions": (recipe("t5"), "cp2 attention=ring", {}),
    "ring: stages of a pipeline": (recipe("llama"), "pp2 cp2 attention=ring", {"micro_batch": 2}),
    "ring: slices of heads": (recipe("llama"), "cp2 tp2 attention=ring", {}),
}
# The others are proved by slow tests: models beside these, three ranks, shards and stages.
FAST = (
    "cross-attention, and relative positions that blocks hand on",
    "a rank works on its part of the tokens",
    "ring: a bias with a gradient",
)
MORE = [name for name in (*SAME, *RING) if name not in FAST]
OTHERS: Mapping[str, Case] = {
    "gradients that are not added up": (recipe("bert"), "cp2", {"engine": Unsummed()}),
    "all tokens": (recipe("llama"), "dp2", {"engine": Widths()}),
    "no tokens": (recipe("mlp"), "cp2", {}),
}


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    return prove({**{name: {**SAME, **RING}[name] for name in FAST}, **OTHERS}, steps=2)


@pytest.mark.parametrize("name", FAST)
def test_split_tokens_take_the_step_of_one_process(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert same(proofs, [name]) == {}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_split_tokens_of_more_models_take_the_step_of_one_process() -> None:
    assert same(prove({name: {**SAME, **RING}[name] for name in MORE}, steps=2), MORE) == {}


def test_gradients_that_are_not_added_up_are_seen(proofs: Mapping[str, Proof | str]) -> None:
    proof = proofs["gradients that are not added up"]
    assert isinstance(proof, Proof), proof
    assert not proof.same_step


def test_a_rank_with_all_tokens_is_seen(proofs: Mapping[str, Proof | str]) -> None:
    assert "tokens on rank" in str(proofs["all tokens"])


def test_a_model_whose_tokens_cannot_be_split_is_refused(proofs: Mapping[str, Proof | str]) -> None:
    reason = "Sequential has neither layers that hand on hidden states nor modules that take each token by itself"
    assert reason in str(proofs["no tokens"])


def test_a_ring_is_refused_where_attention_drops_probabilities() -> None:
    with pytest.raises(
        samestep.LayoutError, match=r"attn drops attention probabilities \(0\.1\), .*attention=ulysses"
    ):
        samestep.train(recipe("gpt2", dropout=True), layout="cp2 attention=ring")


@pytest.mark.parametrize(
    ("layout", "run", "message"),
    [
        ("dp2 attention=ring", {}, "attention=ring is for the ranks of context parallel; use cp2 attention=ring"),
        ("cp2 attention=ring", {"engine": "accelerate"}, 'engine "accelerate" '),
        ("cp2 attention=rings", {}, "attention=rings; it can be ulysses, ring"),
    ],
)
def test_a_ring_is_refused_before_ranks_start(layout: str, run: Mapping[str, Any], message: str) -> None:
    with pytest.raises(samestep.LayoutError, match=message):
        samestep.verify(recipe("bert"), layout=layout, check=False, **run)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", pytest.param("cp2 attention=ring", marks=pytest.mark.slow)])
def test_modules_that_get_all_tokens_drop_out_what_one_process_does(layout: str) -> None:
    cases = {layout: (recipe("encoder"), layout, {})}
    assert same(prove(cases, steps=2, dropout=True), list(cases)) == {}
