"""Pipelines of models whose later layers take more than the hidden state: what is handed on, and the same step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mistakes_of_pipelines as mistakes
import pytest
import tree_tasks as trees
from proving import Case, prove, same
from test_pipeline import Alone, recipe

import samestep
from samestep.verification.proof import Proof
from samestep.verification.tensors import TOLERANCE

UNET = recipe(trees.UNet())
T5 = recipe(trees.t5_task(), batch=8)
BART = recipe(trees.bart_task(), batch=8)
WHISPER = recipe(trees.whisper_task(), batch=8)
TAGGER = recipe(trees.Tagger())
TOWERS = recipe(trees.Towers())
TRANSLATOR = recipe(trees.Translator())
TWICE = recipe(trees.Twice())
TIED = recipe(trees.Tied())

ON_TWO: Mapping[str, Case] = {
    "U-Net, zero bubble": (UNET, "pp2 schedule=interleaved-zero-bubble", {}),
    "one encoder called twice": (TWICE, "pp2 schedule=zbv-zero-bubble", {}),
    "tied layers": (TIED, "pp2", {}),
}
MORE_ON_TWO: Mapping[str, Case] = {
    "states of LSTMs": (TAGGER, "pp2", {}),
    "nn.Transformer with masks": (TRANSLATOR, "pp2 schedule=interleaved-1f1b", {}),
    "U-Net": (UNET, "pp2", {}),
    "U-Net, gpipe": (UNET, "pp2 schedule=gpipe", {"micro_batch": 3}),
    "T5": (T5, "pp2", {}),
    "BART": (BART, "pp2 recompute=full", {}),
    "Whisper": (WHISPER, "pp2", {}),
    "two towers": (TOWERS, "pp2 schedule=interleaved-zero-bubble", {}),
    "weights computed from others": (recipe(trees.Parametrized()), "pp2", {}),
}
# It comes after all others, for what it might leave behind in their ranks.
ON_FOUR: Mapping[str, Case] = {
    "U-Net": (UNET, "pp4", {}),
    "U-Net, sharded": (UNET, "pp2 fsdp2 recompute=full", {}),
    "T5": (T5, "pp4", {}),
    "T5, sliced": (T5, "pp2 tp2", {}),
    "T5, in a V": (T5, "dp2 pp2 schedule=zbv-zero-bubble", {}),
    "BART": (BART, "pp4", {}),
    "BART, sharded": (BART, "pp2 fsdp2", {}),
    "Whisper": (WHISPER, "pp4", {}),
    "Whisper, replicas": (WHISPER, "pp2 dp2", {}),
    "states of LSTMs": (TAGGER, "pp4", {}),
    "two towers": (TOWERS, "pp4", {}),
    "two towers, optimizer sharded": (TOWERS, "pp2 zero1x2 schedule=interleaved-zero-bubble", {}),
    "nn.Transformer with masks": (TRANSLATOR, "pp4", {}),
    "one encoder called twice": (TWICE, "pp4", {}),
    "tied layers": (TIED, "pp2 fsdp2", {}),
}


@pytest.mark.slow
def test_two_ranks_take_the_same_step() -> None:
    assert same(prove(ON_TWO, steps=2, dropout=True), list(ON_TWO)) == {}


@pytest.mark.slow
def test_more_models_take_the_same_step_on_two_ranks() -> None:
    assert same(prove(MORE_ON_TWO, steps=2, dropout=True), list(MORE_ON_TWO)) == {}


@pytest.mark.slow
def test_four_ranks_take_the_same_step() -> None:
    proofs = prove({**ON_FOUR, "Marian": (recipe(trees.marian_task(), batch=8), "pp4", {})}, steps=2, dropout=True)
    assert same(proofs, list(proofs)) == {}


def test_a_gradient_that_is_not_carried_back_is_seen() -> None:
    mistaken: Case = (UNET, "pp2", {"engine": mistakes.NotCarriedBack()})
    (proof,) = prove({"not carried back": mistaken}, steps=2, dropout=True).values()
    assert isinstance(proof, Proof), proof
    assert not proof.same_step
    assert max(proof.max_relative_difference.values()) > 100 * TOLERANCE


def handed_on(task: samestep.Task, layout: str, cut_at: tuple[str, ...] = ()) -> list[list[tuple[str, int]]]:
    """What each stage hands to the next: whose output, and which tensor of it."""
    plan = Alone(task, layout, cut_at).plan
    return [[(plan.calls[given.caller].unit, given.number) for given in stage] for stage in plan.handed_on]


def test_a_skip_is_carried_along_to_where_it_is_taken() -> None:
    stages = handed_on(trees.UNet(), "pp4", ("second", "third", "fourth"))
    assert stages == [
        [("first", 0)],
        [("first", 0), ("second", 0), ("middle", 0)],
        [("first", 0), ("third", 0)],
    ]


def test_every_decoder_layer_gets_the_encoders_output_and_position_biases() -> None:
    cut_at = ("encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert handed_on(trees.t5_task(), "pp4", cut_at) == [
        [("encoder.block.0", 0), ("encoder.block.0", 1)],
        [("encoder.block.1", 0)],
        [("encoder.final_layer_norm", 0), *(("decoder.block.0", number) for number in range(3))],
    ]


def test_states_are_handed_on_where_a_later_layer_begins_with_them() -> None:
    assert handed_on(trees.Tagger(), "pp2", ("second",)) == [[("first", 0), ("first", 1), ("first", 2)]]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_and_is_evaluated(tmp_path: Path) -> None:
    def train(layout: str, name: str, **checkpoint: Any) -> samestep.TrainResult:
        short = recipe(trees.UNet(), steps=4, epochs=None, precision="fp64")
        kept = samestep.Checkpointing(**checkpoint)
        return samestep.train(short, layout=layout, folder=tmp_path / name, threads=1, log=(), checkpoint=kept)

    alone = train("single", "alone", every=2)
    saved = train("pp2", "saved", every=2)
    assert saved.losses == pytest.approx(alone.losses, rel=1e-9)
    assert saved.metrics["accuracy"] == pytest.approx(alone.metrics["accuracy"], rel=1e-6)
    assert saved.metrics["confusion_matrix"] == alone.metrics["confusion_matrix"]
    for layout, source in [("pp2", alone), ("single", saved)]:
        gone_on = train(layout, f"{layout} on", resume=str(source.folder / "checkpoints" / "step-2"))
        assert gone_on.losses == pytest.approx(alone.losses[2:], rel=1e-9)
