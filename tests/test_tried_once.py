"""What a model that is handed over is tried for is found once a job, in few forwards, and ranks get the result."""

import os
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from handed_models import OfPatches, Table, joined, patch_rows, pictures

import samestep
from samestep import api, door
from samestep.job import Job
from samestep.tasks import registry

HERE = Path(__file__).parent
EVALUATED = "evaluate none"


def noted(file: Path) -> list[str]:
    """The forwards in the order of their starts, without their processes."""
    return [line.partition(" ")[2] for line in file.read_text().splitlines()] if file.exists() else []


def recipe_of(file: Path, **kind: bool) -> samestep.Recipe:
    return samestep.Recipe(task=f"{HERE}/tried_task.py:Tried", args={"notes": str(file), **kind}, batch=6)


@pytest.mark.parametrize("even", [True, False])
def test_a_mean_is_found_by_two_forwards(tmp_path: Path, *, even: bool) -> None:
    """By the labels that are left out where texts have one length, else by the logits of the first and of all."""
    file = tmp_path / "notes"
    task = registry.resolve(recipe_of(file, even=even))
    task.check()
    assert noted(file) == [EVALUATED] * 2
    assert task.held_out_tried()
    rows = task.train_set()
    batch = task.collate([rows[index] for index in range(3)])
    assert batch.targets["count"] == sum(int((row != -100).sum()) for row in batch.targets["labels"][:, 1:])


def test_a_job_takes_five_forwards_before_its_ranks_start(tmp_path: Path) -> None:
    """Two find what the loss is a mean over, three are the contract's; neither repeats the held-out rows."""
    file = tmp_path / "notes"
    job = Job(recipe=recipe_of(file))
    door.hold_contract(door.check(job))
    assert noted(file) == [EVALUATED] * 2 + ["train graph"] * 3


@pytest.mark.timeout(120)
def test_three_models_and_three_backwards_come_before_the_ranks_which_build_one_each(tmp_path: Path) -> None:
    file, run = tmp_path / "notes", tmp_path / "run"
    recipe = replace(recipe_of(file, held_out=False), steps=2, epochs=None)
    samestep.train(recipe, layout="dp2", device="cpu", threads=1, folder=run)
    lines = [line.split() for line in Path(f"{file}.besides").read_text().splitlines()]
    here = Counter(text for process, text in lines if process == str(os.getpid()))
    ranks = Counter(process for process, text in lines if process != str(os.getpid()) and text == "built")
    # One to find what the loss is a mean over, two to see that model() gives the same under the same seed.
    assert here == {"built": 3, "backward": 3}
    assert sorted(ranks.values()) == [1, 1]


class Masking(torch.nn.Module):
    """Masks its inputs at random where its configuration says so, as SpecAugment in models of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 3)
        self.config = SimpleNamespace(apply_spec_augment=True, hidden_dropout=0.0, mask_time_prob=0.05, layers=1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        given = pixel_values[:, :, :2, :2].flatten(1)
        if self.training and self.config.apply_spec_augment:
            given = given * torch.from_numpy(np.random.rand(12) < 0.9)
        logits = self.layer(given)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_draw_that_the_configuration_switches_is_refused_with_its_switch() -> None:
    task = samestep.tasks.HuggingFace(model=Masking, data=Table(pictures()))
    job = Job(recipe=samestep.Recipe(task=task, batch=6))
    with pytest.raises(samestep.UserError, match=r"NumPy's generator.*use apply_spec_augment=False in its config"):
        door.hold_contract(door.check(job))


def test_facts_that_another_process_has_found_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    first = door.check(Job(recipe=recipe_of(file)))
    tried = len(noted(file))
    again: door.Ready = pickle.loads(pickle.dumps(first))
    assert again.task is not first.task
    assert again.task is again.of(again.job).task
    assert again.task.tried_facts() == first.task.tried_facts()
    assert len(noted(file)) == tried


@pytest.mark.timeout(120)
def test_ranks_try_nothing_and_layouts_don_t_repeat_it(tmp_path: Path) -> None:
    """Without held-out rows, all forwards in evaluation mode are those that find what the loss is a mean over."""
    file = tmp_path / "notes"
    job = Job(recipe=recipe_of(file, held_out=False))
    rows = api.verify_layouts(job, ["dp2", "zero1x2"], steps=1)
    assert [row.verdict for row in rows] == ["same", "same"]
    evaluated = [line.partition(" ")[0] for line in file.read_text().splitlines() if EVALUATED in line]
    assert evaluated == [str(os.getpid())] * 2
    assert {line.partition(" ")[0] for line in file.read_text().splitlines()} > {str(os.getpid())}


def test_rows_that_are_tried_are_never_cut_and_differ_in_what_counts() -> None:
    """The sizes of the patches stand in one tensor with another first dimension."""
    seen: list[int] = []

    def noting(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        seen.append(len(rows))
        return dict(joined(rows))

    task = samestep.tasks.HuggingFace(model=OfPatches, data=Table(patch_rows()), collator=noting)
    task.check()
    assert {2, 3, 5} <= set(seen)
