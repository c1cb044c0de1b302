"""Ranks whose model() writes files build one after the other; those that only read build at the same time."""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from proving import assert_same_steps
from small_tasks import Points
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import samestep
from samestep.training.in_turn import in_turn

FORK = multiprocessing.get_context("fork")
RANKS, PAUSE = 3, 0.2


def saves_and_loads(folder: Path) -> None:
    file = folder / "config.json"
    with file.open("w", encoding="utf-8") as written:
        time.sleep(PAUSE)  # the file is empty meanwhile
        json.dump({"layers": 2}, written)
    assert json.loads(file.read_text(encoding="utf-8")) == {"layers": 2}


def saves_what_is_not_there(folder: Path) -> None:
    if not (folder / "config.json").exists():
        saves_and_loads(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == {"layers": 2}


def replaces(folder: Path) -> None:
    saves_what_is_not_there(folder)
    (folder / "config.json").unlink()
    time.sleep(PAUSE)
    saves_and_loads(folder)


def keeps_to_itself(_: Path, all_in_it: Any) -> None:
    """Reads, and writes temporary files of its own, while all others do so."""
    with tempfile.TemporaryDirectory() as own:
        (Path(own) / "config.json").write_text("{}", encoding="utf-8")
        all_in_it.wait(20)


def rank(build: Callable[..., None], folder: Path, all_begun: Any, *more: Any) -> None:
    all_begun.wait(20)
    with in_turn():
        build(folder, *more)


def build_on_ranks(build: Callable[..., None], folder: Path, *more: Any) -> None:
    """Call it in processes that begin at once."""
    given = (build, folder, FORK.Barrier(RANKS), *more)
    ranks = [FORK.Process(target=rank, args=given) for _ in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0] * RANKS


@pytest.fixture(autouse=True)
def temporary_files_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("build", [saves_and_loads, saves_what_is_not_there, replaces])
def test_what_a_rank_writes_and_reads_no_other_one_disturbs(
    build: Callable[[Path], None], tmp_path: Path, temporary_files_in_a_folder_of_their_own: Path
) -> None:
    build_on_ranks(build, tmp_path)
    assert list(temporary_files_in_a_folder_of_their_own.iterdir()) == []


def test_ranks_whose_files_are_their_own_do_not_wait(tmp_path: Path) -> None:
    build_on_ranks(keeps_to_itself, tmp_path, FORK.Barrier(RANKS))


class FromFolder(Points):
    """A model of transformers that saves a folder and loads it: one of its own, or one of all ranks."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(samples=12)
        self.folder = folder

    def model(self) -> nn.Module:
        folder = self.folder or tempfile.mkdtemp()
        sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8, num_labels=3)  # pyright: ignore
        BertForSequenceClassification(config).save_pretrained(folder)
        return OfPoints(BertForSequenceClassification.from_pretrained(folder))


class OfPoints(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, points: Tensor) -> Tensor:
        return self.bert((points.abs() * 4).long().clamp(max=8)).logits


def test_a_model_of_transformers_saves_a_folder_and_loads_it_on_each_rank(tmp_path: Path) -> None:
    tasks = (FromFolder(), FromFolder(str(tmp_path / "of all")))
    recipes = [samestep.Recipe(task=task, batch=4, steps=2, optimizer=samestep.AdamW(lr=0.01)) for task in tasks]
    assert_same_steps([(recipe, "dp2", {}) for recipe in recipes], steps=2)


def test_transformers_alone_is_told_that_there_are_no_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined() -> bool:
        return True

    monkeypatch.setattr(dist, "is_initialized", joined)
    of_transformers: dict[str, Any] = {"__name__": "transformers.distributed.utils", "dist": dist}
    exec("def asks():\n    return dist.is_initialized()", of_transformers)
    with in_turn():
        assert not of_transformers["asks"]()
        assert dist.is_initialized()
    assert of_transformers["asks"]()
    assert dist.is_initialized is joined
