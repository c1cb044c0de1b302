"""A resume tells of values that the task or its model holds and that no code and no recipe says."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_tasks import Unscored
from torch import Tensor, nn

import samestep

pytestmark = pytest.mark.quick

SECRET = "s3cret-of-the-task"


CURVES = {"square": torch.square, "absolute": torch.abs}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Curved(nn.Module):
    """Applies a function and a configuration that it is given."""

    def __init__(self, curve: Callable[[Tensor], Tensor], slope: float) -> None:
        super().__init__()
        self.curve, self.options = curve, SimpleNamespace(slope=slope, inner=SimpleNamespace(bias=slope))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0 * self.options.slope * self.curve(inputs)


class Set(Unscored):
    """Takes a weight from a variable, a dropout rate, lists and names of functions from a file of its own."""

    def __init__(self, place: Path) -> None:
        super().__init__(samples=20)
        self.place = str(place)
        self.weight = float(os.environ.get("LOSS_WEIGHT", "1"))
        self.settings = json.loads((place / "settings.json").read_text(encoding="utf-8"))
        self.token = self.settings.pop("token", SECRET)
        self.rate = self.settings.pop("rate")
        chosen = self.settings.pop("chosen")
        self._activation, self._slope = ACTIVATIONS[chosen["activation"]], chosen["slope"]
        self._curve, self.power = CURVES[chosen["curve"]], partial(torch.pow, exponent=chosen["exponent"])

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[3] = nn.Dropout(self.rate)
        model.append(self._activation())
        model.append(Curved(self._curve, self._slope))
        return model

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        loss, count = super().loss(output, batch)
        return self.weight * loss, count


def train(place: Path, **checkpoint: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=Set(place), batch=10, steps=2 if checkpoint.get("resume") is None else 3)
    run = {"threads": 1, "check": False, "log": (), "folder": place / "run"}
    return samestep.train(recipe, checkpoint={"every": 2, **checkpoint}, **run)


def write(place: Path, **settings: Any) -> None:
    chosen = {"activation": "tanh", "curve": "square", "slope": 0.5, "exponent": 2, **settings.pop("chosen", {})}
    values = {"rate": 0.0, "classes": ["a", "b"], "chosen": chosen, **settings}
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
    "the class of a module": (
        lambda place, patch: write(place, chosen={"activation": "relu"}),
        ("5 is ReLU, and was Tanh",),
    ),
    "a function": (
        lambda place, patch: write(place, chosen={"curve": "absolute"}),
        ("Set._curve is abs, and was square", "Curved.curve is abs, and was square"),
    ),
    "an argument of a function": (
        lambda place, patch: write(place, chosen={"exponent": 3}),
        ("Set.power.exponent is 3, and was 2",),
    ),
    "a configuration": (
        lambda place, patch: write(place, chosen={"slope": 0.25}),
        ("Curved.options.slope is 0.25, and was 0.5", "Curved.options.inner.bias is 0.25, and was 0.5"),
    ),
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


def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.sum(), len(output)


def doubled(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return 2 * output.sum(), len(output)


def test_another_loss_that_is_handed_over_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"input": torch.tensor([float(number)])} for number in range(8)]
    for loss, resume in ((summed, "never"), (summed, "last"), (doubled, "last")):
        task = samestep.tasks.HuggingFace(model=nn.Linear(1, 1), data=rows, loss=loss)
        recipe = samestep.Recipe(task=task, batch=4, steps=2)
        capfd.readouterr()
        run = {"threads": 1, "check": False, "log": (), "folder": tmp_path}
        samestep.train(recipe, checkpoint={"every": 2, "resume": resume}, **run)
        line = "HuggingFace.own_loss is doubled, and was summed"
        assert (line in capfd.readouterr().err) == (loss is doubled)
