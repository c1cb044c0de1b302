"""Evaluation: every held-out sample once, and metrics that a count by hand gives too, whatever the ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from scored_task import Scored, evaluations
from torchmetrics.classification import MulticlassAveragePrecision, MulticlassROC

import samestep
from samestep.launch import local

BATCH = 8


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    evaluation = samestep.Evaluation(batch=BATCH, every=values.pop("every", None))
    return samestep.Recipe(
        task=task, batch=16, evaluation=evaluation, optimizer=samestep.AdamW(lr=0.02), **{"steps": 12, **values}
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a trained model."""
    folder = tmp_path_factory.mktemp("trained")
    return samestep.train(recipe(Scored(), steps=60), folder=folder, device="cpu").model_file


def predictions(weights: Path, task: Scored, batch: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The probabilities that a model gives the held-out samples, and their classes."""
    model = task.model()
    model.load_state_dict(load_file(weights))
    model.eval()
    points, classes = (torch.stack(parts) for parts in zip(*task.held_out, strict=True))
    with torch.no_grad():
        scores = torch.cat([model(part).softmax(dim=-1) for part in points.split(batch)])
    return scores.numpy(), classes.numpy()


def by_hand(scores: NDArray[np.float32], classes: NDArray[np.int64]) -> dict[str, Any]:
    """Every metric of the task, by counting."""
    names = ["class 0", "class 1", "class 2"]
    guesses = scores.argmax(axis=1)
    matrix = [[int(((classes == true) & (guesses == guess)).sum()) for guess in range(3)] for true in range(3)]
    found: dict[str, Any] = {
        "accuracy": float((guesses == classes).mean()),
        "confusion_matrix": dict(zip(names, matrix, strict=True)),
        "seen": classes.tolist() if len(classes) > 1 else classes.item(),  # torchmetrics makes one of a list of one
        "precision": {},
        "recall": {},
        "f1": {},
        "curve": {"precision": {}, "recall": {}, "thresholds": {}},
    }
    for number, name in enumerate(names):
        hits = int(((guesses == number) & (classes == number)).sum())
        guessed, there = int((guesses == number).sum()), int((classes == number).sum())
        found["precision"][name] = hits / guessed if guessed else 0.0
        found["recall"][name] = hits / there if there else 0.0
        found["f1"][name] = 2 * hits / (guessed + there) if guessed + there else 0.0
        if not there:
            continue
        thresholds = np.unique(scores[:, number])
        above = [scores[:, number] >= threshold for threshold in thresholds]
        right = [int((chosen & (classes == number)).sum()) for chosen in above]
        found["curve"]["thresholds"][name] = thresholds.tolist()
        found["curve"]["precision"][name] = [
            *(n / int(chosen.sum()) for n, chosen in zip(right, above, strict=True)),
            1.0,
        ]
        found["curve"]["recall"][name] = [*(n / there for n in right), 0.0]
    return found


def same(found: Any, expected: Any) -> None:
    """Hold two nests of numbers against each other, up to float32's rounding."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    else:
        assert found == pytest.approx(expected, rel=1e-6)


# Of the held-out samples and the batch of one forward: with three ranks the first leaves one rank without a last
# batch; the second has less than a batch for each rank; the third has fewer samples than ranks, as has the fourth.
SIZES = [(50, BATCH), (17, 16), (2, 1), (1, 4)]


@pytest.fixture(scope="module")
def cases(weights: Path) -> list[tuple[Scored, int]]:
    return [
        (Scored(samples=77 + 50 - held_out, held_out=held_out, weights=weights, curve=held_out > 2), batch)
        for held_out, batch in SIZES
    ]


@pytest.fixture(scope="module")
def alone(cases: list[tuple[Scored, int]]) -> list[dict[str, Any]]:
    return evaluations(cases)


@pytest.mark.parametrize("number", range(len(SIZES)), ids=map(str, SIZES))
def test_metrics_are_those_counted_by_hand(
    number: int, weights: Path, cases: list[tuple[Scored, int]], alone: list[dict[str, Any]]
) -> None:
    expected = by_hand(*predictions(weights, *cases[number]))
    if not cases[number][0].curve:
        del expected["curve"]
    same(alone[number], expected)


def test_the_model_has_learned(alone: list[dict[str, Any]]) -> None:
    """So that the metrics are not those of a model that always says the same."""
    rows = alone[0]["confusion_matrix"].values()
    assert alone[0]["accuracy"] > max(sum(row) for row in rows) / 50
    assert all(any(row[guess] for row in rows) for guess in range(3))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_ranks_find_exactly_the_same(
    ranks: int, cases: list[tuple[Scored, int]], alone: list[dict[str, Any]]
) -> None:
    assert local.start(evaluations, [cases], ranks) == alone


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> samestep.TrainResult:
    """A training on two ranks, evaluated after steps 5, 10 and 12, the last."""
    folder = tmp_path_factory.mktemp("on_two_ranks")
    return samestep.train(recipe(Scored(), every=5), layout="dp2", folder=folder, device="cpu")


def test_a_training_on_two_ranks_ends_in_the_metrics_of_its_weights(on_two_ranks: samestep.TrainResult) -> None:
    same(on_two_ranks.metrics, by_hand(*predictions(on_two_ranks.model_file, Scored(), BATCH)))


def test_every_evaluation_has_its_line(on_two_ranks: samestep.TrainResult, tmp_path: Path) -> None:
    text = (on_two_ranks.folder / "evaluations.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 12]
    for line in lines:
        stopped = samestep.train(
            recipe(Scored(), steps=line["step"]), folder=tmp_path / str(line["step"]), device="cpu"
        )
        expected = by_hand(*predictions(stopped.model_file, Scored(), BATCH))
        assert line["accuracy"] == pytest.approx(expected["accuracy"])


def test_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    """With dropout, which evaluation switches off and on again, and whose random numbers it must not use up."""
    often, once = (
        samestep.train(recipe(Scored(dropout=0.4), every=every), folder=tmp_path / str(every), device="cpu")
        for every in (1, None)
    )
    assert often.losses == once.losses
    assert often.metrics == once.metrics


class WithCurves(Scored):
    """Another curve, and a number a class that torchmetrics derives from a curve."""

    def metrics(self) -> dict[str, Any]:
        return {"roc": MulticlassROC(3), "average_precision": MulticlassAveragePrecision(3, average=None)}


def test_other_curves_have_named_parts_and_areas_stay_numbers(tmp_path: Path, weights: Path) -> None:
    result = samestep.train(recipe(WithCurves()), folder=tmp_path, device="cpu")
    scores, classes = predictions(result.model_file, Scored(), BATCH)
    roc, area = result.metrics["roc"], result.metrics["average_precision"]
    assert roc.keys() == {"false_positive_rate", "true_positive_rate", "thresholds"}
    for number, name in enumerate(Scored().class_names()):
        positive = classes == number
        for key, among in (("true_positive_rate", positive), ("false_positive_rate", ~positive)):
            rates = [(scores[among, number] >= threshold).mean() for threshold in roc["thresholds"][name][1:]]
            assert roc[key][name] == pytest.approx([0, *rates], rel=1e-6)  # the first threshold lets none through
        curve = by_hand(scores, classes)["curve"]
        steps = -np.diff(curve["recall"][name])
        assert area[name] == pytest.approx(float((steps * curve["precision"][name][:-1]).sum()), rel=1e-5)
