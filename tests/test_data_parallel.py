"""Engine data-parallel: threads over several accelerators; on fewer than two it says so and runs on one device."""

import pytest
from engine_recipes import recipe
from small_tasks import Points
from torch import nn

import samestep
from samestep.engines import data_parallel


def test_without_accelerators_it_says_so_and_takes_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    proof = samestep.verify(recipe(), engine="data-parallel", micro_batch=7, device="cpu")
    assert proof.same_step, proof
    assert "engine data-parallel: 0 accelerators here; it runs on one device, cpu" in capsys.readouterr().err


class Normed(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, self.classes))


def test_batch_norm_of_micro_batches_is_refused() -> None:
    assert samestep.verify(recipe(Normed()), engine="data-parallel", device="cpu").same_step
    with pytest.raises(samestep.UserError, match=r"BatchNorm1d.* takes its statistics from the whole batch"):
        samestep.verify(recipe(Normed()), engine="data-parallel", micro_batch=7, device="cpu")


def test_it_splits_no_axis() -> None:
    with pytest.raises(samestep.LayoutError, match='engine "data-parallel" does not split replicate'):
        samestep.verify(recipe(), layout="dp2", engine="data-parallel")


def test_batch_norm_over_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(samestep.UserError, match=r"1 \(BatchNorm1d\) would take .* layout dp2"):
        data_parallel._check_batch_norm(model, devices=2)
