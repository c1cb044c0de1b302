"""Context parallel: tokens split over ranks, and the same step."""

from typing import Any

import pytest
import torch.distributed as dist
from tiny_models import Tiny
from torch import nn

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native import Native, NativeTrainer


def recipe(name: str, **values: Any) -> samestep.Recipe:
    settings = {"batch": 10, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return samestep.Recipe(task=Tiny(name=name), **{**settings, **values})


@pytest.mark.parametrize(
    ("name", "layout", "micro_batch"),
    [
        ("bert", "cp2", None),
        ("llama", "cp2", 4),
        ("qwen3", "cp3", None),  # heads are no multiple of the ranks
        ("gpt2", "fsdp2 cp2 recompute=full", None),
        ("vit", "dp2 cp2", None),
        ("t5", "cp2", None),  # cross-attention, and relative positions that its blocks hand on
        ("encoder", "cp3 recompute=full", 4),  # nn.MultiheadAttention, which gets all tokens
        ("umt5", "cp2", None),  # each layer makes a bias of as many tokens as it sees
        ("gpt-oss", "cp2", None),  # a softmax over tokens and a sink
        ("jamba", "cp2", None),  # layers of two classes: attention, and a mixer whose state runs over the tokens
    ],
)
def test_split_tokens_take_the_step_of_one_process(name: str, layout: str, micro_batch: int | None) -> None:
    proof = samestep.verify(recipe(name), layout=layout, micro_batch=micro_batch)
    assert proof.same_step, proof


def test_modules_that_get_all_tokens_drop_out_what_one_process_does() -> None:
    proof = samestep.verify(recipe("encoder"), layout="cp2", dropout=True)
    assert proof.same_step, proof


class Unsummed(Native):
    """Gradients of the blocks that nobody adds up."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        trainer._spread.parts.table.clear()
        return trainer


def test_gradients_that_are_not_added_up_are_seen() -> None:
    assert not samestep.verify(recipe("bert"), layout="cp2", engine=Unsummed()).same_step


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


def test_a_rank_works_on_its_part_of_the_tokens() -> None:
    assert samestep.verify(recipe("llama"), layout="cp2", engine=Widths()).same_step  # 11 tokens at most
    with pytest.raises(samestep.LayoutError, match="tokens on rank"):
        samestep.verify(recipe("llama"), layout="dp2", engine=Widths())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "mlp",
            "Sequential has neither layers that hand on hidden states nor modules that take each token by itself",
        ),
    ],
)
def test_a_model_whose_tokens_cannot_be_split_is_refused(name: str, reason: str) -> None:
    with pytest.raises(samestep.LayoutError) as error:
        samestep.verify(recipe(name), layout="cp2")
    assert reason in str(error.value)
