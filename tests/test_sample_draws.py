"""Augmentation: what a data set draws for a sample depends on seed, epoch and index, in every layout and worker."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proving import assert_same_steps
from small_tasks import Points
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.data.sample_draws import EpochIndices, SeededSamples


class Jittered(Dataset[Any]):
    """Points that are moved at random, by numbers of all three generators."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = self.pairs[index]
        return point + 0.5 * torch.randn(4) + np.random.normal() + random.gauss(0, 1), label


class Together(Jittered):
    """As data sets of Hugging Face read several rows at a time, and transform them together."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class ByEpoch(Jittered):
    """Draws nothing, but has a set_epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = self.pairs[index]
        return point + self.epoch, label


class OwnGenerator(Jittered):
    """Draws from a generator that nobody can seed for a sample."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(pairs)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = self.pairs[index]
        return point + self.generator.normal(), label


class Augmented(Points):
    def __init__(self, kind: type[Jittered] = Jittered) -> None:
        super().__init__(samples=41)
        self.kind = kind

    def train_set(self) -> samestep.Samples:
        return self._set

    @property
    def _set(self) -> Jittered:
        if "_made" not in vars(self):
            self._made = self.kind(self.pairs)
        return self._made


def read(kind: type[Jittered], indices: Sequence[int], epoch: int = 0, seed: int = 0) -> list[Any]:
    samples = SeededSamples(kind(Points(samples=41).pairs), seed)
    return [point.tolist() for point, _ in samples.read(EpochIndices(indices, epoch))]


@pytest.mark.parametrize("kind", [Jittered, Together])
def test_a_sample_is_the_same_in_any_company_and_another_in_each_epoch_and_seed(kind: type[Jittered]) -> None:
    together = read(kind, [3, 40, 7, 0])
    assert together == [*read(kind, [3]), *read(kind, [40, 7]), *read(kind, [0])]
    assert together == read(Jittered, [3, 40, 7, 0])
    for others in (read(kind, [3, 40, 7, 0], epoch=1), read(kind, [3, 40, 7, 0], seed=1)):
        assert all(one != other for one, other in zip(together, others, strict=True))


def seed_all() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


@pytest.mark.parametrize("kind", [Jittered, Together])
def test_the_generators_are_left_as_they_were(kind: type[Jittered]) -> None:
    seed_all()
    expected = torch.rand(()).item(), np.random.random(), random.random()
    seed_all()
    read(kind, [1, 2, 3])
    assert (torch.rand(()).item(), np.random.random(), random.random()) == expected


def test_noise_of_neighbours_is_independent() -> None:
    points = [point for point, _ in Points(samples=41).pairs]
    noise = np.array(read(Jittered, range(41))) - torch.stack(points).numpy()
    correlations = np.corrcoef(noise)[~np.eye(41, dtype=bool)]
    assert np.abs(noise.mean()) < 0.5
    assert np.abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.5
    assert np.isfinite(correlations).all()


def recipe_of(kind: type[Jittered] = Jittered) -> samestep.Recipe:
    optimizer = samestep.SGD(lr=0.1)
    return samestep.Recipe(task=Augmented(kind), batch=16, steps=6, optimizer=optimizer, precision="fp64")


def losses(folder: Path, kind: type[Jittered] = Jittered, **run: Any) -> Sequence[float]:
    return samestep.train(recipe_of(kind), **{"threads": 1, "device": "cpu", "folder": folder, **run}).losses


def test_workers_and_a_resumption_augment_alike(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "workers", workers=2) == pytest.approx(whole, rel=1e-12)
    recipe = recipe_of()
    options: dict[str, Any] = {"threads": 1, "device": "cpu", "folder": tmp_path / "ended"}
    samestep.train(recipe, **options, checkpoint={"every": 2, "keep": 9})
    for later in (tmp_path / "ended/checkpoints").glob("step-*"):
        if int(later.name.removeprefix("step-")) > 4:
            later.rename(tmp_path / later.name)  # as if it had ended after its fourth step, in the second epoch
    again = samestep.train(recipe, **options, checkpoint={"every": 2, "keep": 9, "resume": "auto"})
    assert again.losses == pytest.approx(whole, rel=1e-12)


def test_a_training_reads_each_epochs_samples(tmp_path: Path) -> None:
    """Three steps an epoch, of 16, 16 and 9 samples; in the second epoch each sample has other noise."""
    seen: list[tuple[int, float]] = []
    original = Jittered.__getitem__

    def noted(self: Jittered, index: int) -> tuple[Tensor, Tensor]:
        point, label = original(self, index)
        seen.append((index, point[0].item()))
        return point, label

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Jittered, "__getitem__", noted)
        samestep.train(recipe_of(), threads=1, device="cpu", folder=tmp_path)
    by_index = {index: {value for number, value in seen if number == index} for index, _ in seen}
    for index in range(41):
        expected = {round(read(Jittered, [index], epoch)[0][0], 6) for epoch in (0, 1)}
        assert {round(value, 6) for value in by_index[index]} >= expected


def test_set_epoch_is_called(tmp_path: Path) -> None:
    assert read(ByEpoch, [2], epoch=3)[0] == (Points(samples=41).pairs[2][0] + 3).tolist()
    assert losses(tmp_path / "a", ByEpoch) == pytest.approx(losses(tmp_path / "b", ByEpoch, workers=1), rel=1e-12)


def test_layouts_take_the_same_step() -> None:
    recipe = samestep.Recipe(task=Augmented(), batch=15, steps=6)
    together = samestep.Recipe(task=Augmented(Together), batch=15, steps=6)
    cases = [(recipe, layout, {}) for layout in ("dp2", "fsdp2", "tp2", "pp2")]
    assert_same_steps([*cases, (recipe, "dp2", {"micro_batch": 2}), (together, "dp2", {})], steps=4)


def test_a_generator_of_its_own_is_refused_with_what_to_use() -> None:
    recipe = samestep.Recipe(task=Augmented(OwnGenerator), batch=16, steps=2)
    with pytest.raises(samestep.UserError) as refused:
        samestep.train(recipe, threads=1, device="cpu")
    message = str(refused.value)
    assert "train_set()[0] gives another sample the second time" in message
    assert "the generators of torch, NumPy and Python were seeded alike" in message
    assert "\n" not in message


class SeededByNumpy(OwnGenerator):
    """As the documentation advises: a generator made for each sample, seeded by NumPy's."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.generator = np.random.default_rng(np.random.randint(2**31))
        return super().__getitem__(index)


def test_the_advice_helps(tmp_path: Path) -> None:
    assert losses(tmp_path / "a", SeededByNumpy) == pytest.approx(losses(tmp_path / "b", SeededByNumpy, workers=1))
