"""`samestep.verify`: every layout takes one process's steps, and every classic mistake is seen."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mistakes
import pytest
from proving import assert_same_steps, prove, same
from small_tasks import Lines, Points, Words

import samestep
from samestep.verification.proof import Proof, difference
from samestep.verification.tensors import TOLERANCE


def recipe(task: samestep.Task | str, batch: int = 32) -> samestep.Recipe:
    return samestep.Recipe(
        task=task,
        batch=batch,
        epochs=2,
        clip=0.5,
        optimizer=samestep.AdamW(lr=1e-2),
        schedule=samestep.Schedule(warmup=4, decay="cosine"),
    )


@pytest.mark.parametrize(
    ("layout", "batch", "micro_batch"),
    [
        ("single", 32, 5),
        ("dp2", 32, None),
        pytest.param("dp3", 32, 4, marks=pytest.mark.slow),
        pytest.param("dp4", 7, None, marks=pytest.mark.slow),
    ],
)
def test_a_layout_takes_the_step_of_one_process(layout: str, batch: int, micro_batch: int | None) -> None:
    # 200 samples: with batches of 32 the seventh step, the last of its epoch, has 8 samples.
    proof = samestep.verify(recipe(Points(dropout=0.5), batch), layout=layout, steps=8, micro_batch=micro_batch)
    assert proof.same_step, proof
    assert (proof.layout, proof.dtype, proof.steps) == (layout, "float64", 8)
    assert set(proof.max_relative_difference) == {"loss", "grad_norm", "parameters", "metrics"}


def test_micro_batches_of_like_length_take_the_same_step() -> None:
    grouped = {"group_by_length": True}
    cases = [("dp2", {**grouped, "micro_batch": 5}), ("dp2", grouped), ("fsdp2", {**grouped, "micro_batch": 4})]
    lines = samestep.Recipe(task=Lines(), batch=33, epochs=1, optimizer=samestep.AdamW(lr=1e-2))
    assert_same_steps([(lines, layout, run) for layout, run in cases], steps=7)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 4], r"lengths is a list of shape \[2\]; use 200 whole numbers, the length of each sample"),
        ([1.5] * 200, r"lengths is a list of shape \[200\]; use 200 whole numbers"),
        ([-1] * 200, r"lengths is a list of shape \[200\]; use 200 whole numbers"),
        ([[1], [1, 2]], r"lengths is a list of shape \[\]; use 200 whole numbers"),
    ],
)
def test_wrong_lengths_are_told(tmp_path: Path, lengths: list[Any], message: str) -> None:
    class Wrong(Lines):
        def sample_lengths(self) -> list[Any]:
            return lengths

    recipe = samestep.Recipe(task=Wrong(), batch=33, epochs=1)
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe, group_by_length=True, check=False, folder=tmp_path / "run")


def test_a_task_without_lengths_is_told() -> None:
    recipe = samestep.Recipe(task=Points(), batch=32, epochs=1)
    with pytest.raises(samestep.UserError, match=r"run.group_by_length is true, and the task does not say how long"):
        samestep.train(recipe, group_by_length=True)


def test_a_last_batch_smaller_than_the_ranks_takes_the_same_step() -> None:
    # 66 samples in batches of 32: the third step has two samples, for three ranks.
    proof = samestep.verify(recipe(Points(samples=66)), layout="dp3", steps=4)
    assert proof.same_step, proof


def test_a_loss_over_words_takes_the_same_step() -> None:
    proof = samestep.verify(recipe(Words()), layout="dp2", steps=5, micro_batch=3)
    assert proof.same_step, proof


@pytest.fixture(scope="module")
def planted() -> Mapping[str, Proof | str]:
    # The engine without a mistake comes last: what the others might leave behind in their ranks would make it differ.
    engines = (*mistakes.CLASSIC, mistakes.Native)
    points = recipe(Points(), batch=33)
    return prove({engine.__name__: (points, "dp2", {"engine": engine()}) for engine in engines}, steps=5)


@pytest.mark.parametrize("mistake", mistakes.CLASSIC, ids=lambda mistake: mistake.__name__)
def test_a_classic_mistake_is_seen(mistake: type[mistakes.Native], planted: Mapping[str, Proof | str]) -> None:
    proof = planted[mistake.__name__]
    assert isinstance(proof, Proof), proof
    assert not proof.same_step
    assert max(proof.max_relative_difference.values()) > 100 * TOLERANCE


def test_the_planted_engine_without_a_mistake_takes_the_same_step(planted: Mapping[str, Proof | str]) -> None:
    assert same(planted, [mistakes.Native.__name__]) == {}


def test_steps_must_be_positive() -> None:
    with pytest.raises(samestep.UserError, match="steps is 0; it must be a whole number from 1 to 1,000,000,000"):
        samestep.verify(recipe("regression"), steps=0)


def test_differences_of_nested_values() -> None:
    assert difference({"a": [1.0, 2.0]}, {"a": [1.0, 2.0]}) == 0
    assert difference({"a": [1.0, 2.2]}, {"a": [1.0, 2.0]}) == pytest.approx(0.1)
    assert difference({"a": [1.0]}, {"a": [1.0, 2.0]}) == math.inf
    assert difference({"b": 1.0}, {"a": 1.0}) == math.inf
    assert difference(math.nan, 1.0) == math.inf
    assert difference({"thresholds": [0.1], "recall": [1.0]}, {"thresholds": [0.2], "recall": [1.0]}) == 0


def test_a_proof_becomes_json_even_where_a_value_is_no_number() -> None:
    differences = {"loss": math.inf, "grad_norm": 0.0, "parameters": 0.0, "metrics": 0.0}
    proof = samestep.Proof(
        layout="dp2",
        dtype="float64",
        steps=5,
        max_relative_difference=differences,
        tolerance=TOLERANCE,
        worst_parameter="weight",
    )
    written = json.loads(json.dumps(proof.to_json(), allow_nan=False))
    assert written["same_step"] is False
    assert written["max_relative_difference"]["loss"] is None


def test_a_metric_that_is_undefined_for_both_is_no_difference() -> None:
    assert difference({"recall": [math.nan, 0.5]}, {"recall": [math.nan, 0.5]}) == 0
    assert difference({"recall": [math.nan]}, {"recall": [0.5]}) == math.inf
    assert difference({"recall": [0.5]}, {"recall": [math.nan]}) == math.inf
