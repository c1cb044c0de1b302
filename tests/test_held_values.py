"""A resume tells of values that the task or its model holds and that no code and no recipe says."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tasks import Unscored
from torch import Tensor, nn

import samestep

pytestmark = pytest.mark.quick

SECRET = "s3cret-of-the-task"


class Set(Unscored):
    """Takes a weight from a variable, a dropout rate and lists from a file of its own."""

    def __init__(self, place: Path) -> None:
        super().__init__(samples=20)
        self.place = str(place)
        self.weight = float(os.environ.get("LOSS_WEIGHT", "1"))
        self.settings = json.loads((place / "settings.json").read_text(encoding="utf-8"))
        self.token = self.settings.pop("token", SECRET)
        self.rate = self.settings.pop("rate")

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[3] = nn.Dropout(self.rate)
        return model

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        loss, count = super().loss(output, batch)
        return self.weight * loss, count


def train(place: Path, **checkpoint: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=Set(place), batch=10, steps=2 if checkpoint.get("resume") is None else 3)
    run = {"threads": 1, "check": False, "tensorboard": False, "folder": place / "run"}
    return samestep.train(recipe, checkpoint={"every": 2, **checkpoint}, **run)


def write(place: Path, **settings: Any) -> None:
    values = {"rate": 0.0, "classes": ["a", "b"], **settings}
    (place / "settings.json").write_text(json.dumps(values), encoding="utf-8")


def variable(place: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("LOSS_WEIGHT", "2.5")


CHANGES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "nothing": (lambda place, patch: None, ()),
    "a variable": (variable, ("Set.weight is 2.5, and was 1.0",)),
    "a rate of the model": (
        lambda place, patch: write(place, rate=0.25),
        ("Set.rate is 0.25, and was 0.0", "Dropout.p is 0.25, and was 0.0"),
    ),
    "an item of a list": (lambda place, patch: write(place, classes=["b", "a"]), ("Set.settings is another",)),
    "a text": (lambda place, patch: write(place, token="another"), ("Set.token is another",)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change, said = CHANGES[name]
    write(tmp_path)
    train(tmp_path)
    saved = (tmp_path / "run" / "checkpoints" / "step-2" / "checkpoint.json").read_text(encoding="utf-8")
    assert SECRET not in saved
    change(tmp_path, monkeypatch)
    capfd.readouterr()
    assert train(tmp_path, resume="last").first_step == 2
    told = [line for line in capfd.readouterr().err.splitlines() if "holds other values than when" in line]
    assert len(told) == bool(said)
    for each in said:
        assert each in told[0]
    assert told == [] or told[0].endswith("; the training goes on with the present ones")
