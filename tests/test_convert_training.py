"""Trainings that begin with converted weights, under any layout."""

from pathlib import Path

import pytest
import torch
from formats import points, points_file, same, trained
from safetensors.torch import load_file
from small_tasks import Points
from torch import nn

from samestep.convert.convert import convert
from samestep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")


@pytest.fixture
def mlp_file(tmp_path: Path) -> Path:
    return points_file(tmp_path)


class Started(Points):
    """The same points, with a model that begins with the weights of a file."""

    def __init__(self, *, file: Path) -> None:
        super().__init__()
        self.file = file

    def model(self) -> nn.Module:
        model = super().model()
        model.load_state_dict(torch.load(self.file, weights_only=True))
        return model


def test_a_training_begins_with_converted_weights(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "step-0")
    resumed = trained(points(Points()), tmp_path / "resumed", resume=str(tmp_path / "step-0"))
    plain = trained(points(Started(file=mlp_file)), tmp_path / "plain")
    assert resumed.first_step == 0
    assert resumed.losses == plain.losses
    assert resumed.metrics == plain.metrics
    assert resumed.losses != trained(points(Points()), tmp_path / "other").losses


def test_it_begins_under_any_layout_and_ends_as_one_model(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "step-0", dtype="float64")
    recipe = points(Points(), precision="fp64")
    resumed = trained(recipe, tmp_path / "resumed", "fsdp2", resume=str(tmp_path / "step-0"))
    plain = trained(points(Started(file=mlp_file), precision="fp64"), tmp_path / "plain")
    assert resumed.losses == pytest.approx(plain.losses, rel=1e-10)
    convert(tmp_path / "resumed", tmp_path / "whole.safetensors")
    same(load_file(tmp_path / "whole.safetensors"), load_file(resumed.model_file))


def test_weights_of_another_type_are_no_beginning(tmp_path: Path, mlp_file: Path) -> None:
    convert(mlp_file, tmp_path / "half", to="samestep", dtype="bfloat16")
    with pytest.raises(UserError, match=r"of bfloat16, and .* of float32; .* --dtype float32 makes it so"):
        trained(points(Points()), tmp_path / "run", resume=str(tmp_path / "half"))
    convert(tmp_path / "half", tmp_path / "step-0", dtype="float32")
    assert trained(points(Points()), tmp_path / "run", resume=str(tmp_path / "step-0")).steps == 5
