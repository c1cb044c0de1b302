"""Early stop: when a training ends, on which ranks, what it keeps, and that a resumed one goes on counting."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import Points
from torch import Tensor
from unsafe import rewrite_info

import samestep
from samestep import EarlyStop, Evaluation, UserError
from samestep.launch import local


class Told:
    """A metric whose values are told beforehand; it begins with those of the steps before `first`."""

    def __init__(self, values: list[float], seen: list[int]) -> None:
        self.values, self.seen = values, seen

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> Tensor:
        self.seen[0] += 1
        return torch.tensor(float(self.values[self.seen[0] - 1]))


class Scripted(Points):
    """Points whose evaluations give the values of a list, the first of which `before` have been given."""

    def __init__(self, values: list[float], before: int = 0) -> None:
        super().__init__(samples=20)
        self.values, self.seen = values, [before]

    def eval_set(self) -> samestep.Samples:
        return [self.train_set()[0], self.train_set()[1]]

    def metrics(self) -> Mapping[str, Any]:
        return {"score": Told(self.values, self.seen), "other": Told([0.0] * 99, [0])}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)


def train(
    folder: Path, values: list[float], stop: EarlyStop, layout: str = "single", before: int = 0, **run: Any
) -> samestep.TrainResult:
    """A step, then an evaluation, twelve times at most."""
    task = Scripted(values, before)
    recipe = samestep.Recipe(task=task, batch=4, steps=12, evaluation=Evaluation(every=1), early_stop=stop)
    return samestep.train(recipe, layout, folder=folder, threads=1, log=(), check=False, **run)


CASES: Mapping[str, tuple[EarlyStop, list[float], int | None]] = {
    "no better": (EarlyStop(metric="score", patience=2), [1, 3, 2, 2.5, 9], 4),
    "better in between": (EarlyStop(metric="score", patience=2), [1, 3, 2, 4, 3, 4, 9], 6),
    "always better": (EarlyStop(metric="score", patience=1), [*range(12)], None),
    "lowest": (EarlyStop(metric="score", mode="lowest", patience=2), [5, 4, 4, 3, 4, 5, 0], 6),
    "not by enough": (EarlyStop(metric="score", patience=2, min_delta=0.5), [1, 1.5, 2, 2.4, 2.5, 9], 5),
    "no number": (EarlyStop(metric="score", patience=2), [float("nan")] * 9, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_ends_after_evaluations_that_are_not_better(tmp_path: Path, name: str) -> None:
    stop, values, steps = CASES[name]
    result = train(tmp_path / "run", values, stop)
    assert (result.steps, len(result.losses)) == (steps or 12, steps or 12)
    report = json.loads((result.folder / "report.json").read_text())
    assert report["steps"] == result.steps
    assert report.get("stopped_early") == result.stopped_early
    if steps is None:
        assert result.stopped_early is None
    else:
        assert result.stopped_early is not None
        assert result.stopped_early.startswith(f"stopped early after step {steps}: score has not ")
        lines = (result.folder / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
        assert str(result.metrics["score"]) == str(float(values[steps - 1]))


def test_what_was_best_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop, values, _ = CASES["not by enough"]
    result = train(tmp_path / "run", values, stop)
    told = "score has not come above 2 (step 3) by more than 0.5 in 2 evaluations"
    assert result.stopped_early == f"stopped early after step 5: {told}"
    assert told in capfd.readouterr().err


def test_the_best_checkpoint_stays_and_the_last_one_is_resumed_as_it_ended(tmp_path: Path) -> None:
    stop, values, _ = CASES["no better"]
    result = train(tmp_path / "run", values, stop, checkpoint={"keep": 1})
    assert sorted(path.name for path in (result.folder / "checkpoints").iterdir()) == ["step-2", "step-4"]
    again = train(tmp_path / "run", values, stop, before=3, checkpoint={"keep": 1, "resume": "auto"})
    assert (again.first_step, again.steps) == (4, 4)
    assert again.stopped_early == result.stopped_early
    more = EarlyStop(metric="score", patience=3)
    later = train(tmp_path / "run", [*values, *[9.0] * 9], more, before=4, checkpoint={"keep": 1, "resume": "auto"})
    assert later.first_step == 4
    assert later.steps == 8  # better at step 5, and three times no better


def test_a_resumed_training_goes_on_counting(tmp_path: Path) -> None:
    stop, values, steps = CASES["better in between"]
    assert steps is not None
    kept = {"every": 1, "keep": 20}
    train(tmp_path / "run", values, stop, checkpoint=kept)
    for step in range(1, steps):
        place = str(tmp_path / "run" / "checkpoints" / f"step-{step}")
        resumed = train(tmp_path / f"{step}", values, stop, before=step, checkpoint={"resume": place})
        assert (resumed.first_step, resumed.steps) == (step, steps)


@pytest.mark.slow
def test_all_ranks_end_together(tmp_path: Path) -> None:
    stop, values, steps = CASES["better in between"]
    for layout in ("dp2", "pp2"):
        assert train(tmp_path / layout, values, stop, layout, checkpoint={}).steps == steps


MISTAKES: Mapping[str, tuple[dict[str, Any], str]] = {
    "patience 0": ({"patience": 0}, "recipe.early_stop.patience is 0; it should be greater than 0"),
    "min_delta": ({"min_delta": -1}, "recipe.early_stop.min_delta is -1; it should be greater than or equal to 0"),
    "mode": ({"mode": "max"}, "recipe.early_stop.mode is 'max'; it should be 'highest' or 'lowest'"),
    "key": ({"patients": 3}, 'unknown key "recipe.early_stop.patients"; did you mean "patience"?'),
    "every": ({}, "recipe.early_stop: early_stop looks at evaluations between steps, and recipe.evaluation.every"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_values_are_told_with_their_key(name: str) -> None:
    from samestep.job import Job
    from samestep.validation import checked

    values, told = MISTAKES[name]
    every = {} if name == "every" else {"every": 2}
    stop = {"metric": "score", **values}
    with pytest.raises(UserError) as refused:
        checked(Job, {"recipe": {"task": "regression", "evaluation": every, "early_stop": stop}})
    assert told in str(refused.value)


def test_an_unknown_metric_is_told_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start", None)
    with pytest.raises(UserError, match=r"recipe\.early_stop\.metric is skore, .* use score, other$"):
        train(tmp_path / "run", [1.0], EarlyStop(metric="skore"), "dp2")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_metric_of_several_numbers_is_told_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "start", None)
    stop = EarlyStop(metric="confusion_matrix")
    recipe = samestep.Recipe(
        task=Points(samples=20), batch=4, steps=4, evaluation=Evaluation(every=1), early_stop=stop
    )
    told = r"confusion_matrix, which is not one number; use accuracy \(.*small_tasks\.py:\d+\)$"
    with pytest.raises(UserError, match=told):
        samestep.train(recipe, "dp2", folder=tmp_path / "run", threads=1)
    assert not (tmp_path / "run").exists()


def test_held_out_samples_are_wanted(tmp_path: Path) -> None:
    class Without(Points):
        def eval_set(self) -> None:
            return None

    recipe = samestep.Recipe(
        task=Without(samples=8), batch=4, evaluation=Evaluation(every=1), early_stop=EarlyStop(metric="accuracy")
    )
    with pytest.raises(
        UserError, match=r"Without has no held-out samples to evaluate; use recipe\.data\.held_out or"
    ):
        samestep.train(recipe, folder=tmp_path / "run", threads=1)


@pytest.mark.parametrize(("name", "count"), [("worse", 10**30), ("step", 3), ("best_step", -1), ("worse", True)])
def test_counts_that_no_training_of_so_many_steps_has_are_refused(tmp_path: Path, name: str, count: int) -> None:
    """They would end the training at once, or never."""
    stop = EarlyStop(metric="accuracy", patience=5)
    recipe = samestep.Recipe(
        task=Points(samples=20), batch=10, steps=2, evaluation=Evaluation(every=1), early_stop=stop
    )
    run: dict[str, Any] = {"folder": tmp_path / "run", "threads": 1, "check": False, "log": ()}
    samestep.train(recipe, checkpoint={"every": 2}, **run)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    rewrite_info(checkpoint, lambda values: values["extra"]["early_stop"].update({name: count}))
    with pytest.raises(samestep.UserError, match=r"the checkpoint's counts of evaluations are .*; resume without"):
        samestep.train(replace(recipe, steps=3), checkpoint={"resume": "last"}, **run)
