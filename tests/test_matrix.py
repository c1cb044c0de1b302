"""`samestep verify --layouts`: a table of many jobs under many layouts."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_tasks import Points
from tiny_models import Tiny
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import samestep
from samestep import api, door
from samestep.cli.main import main
from samestep.errors import LayoutError, RankFailedError, UserError
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.verification import matrix
from samestep.verification.matrix import layouts_of

pytestmark = pytest.mark.quick

EXAMPLES = Path(__file__).parent.parent / "examples" / "proof"

JOB = """
recipe: {task: regression, args: {samples: 40, held_out: 10}, batch: 8, epochs: 1}
"""


@pytest.fixture
def jobs(tmp_path: Path) -> list[str]:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text(JOB, encoding="utf-8")
    return [str(file) for file in files]


@pytest.mark.processes
def test_every_job_under_every_layout(jobs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "matrix.json"
    assert main(["verify", *jobs, "--layouts", "dp2, cp2", "--json", str(report)]) == 0
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [(row["job"], row["layout"], row["verdict"]) for row in rows] == [
        (job, layout, verdict) for job in ("one", "two") for layout, verdict in (("dp2", "same"), ("cp2", "refused"))
    ]
    assert all(row["proof"]["same_step"] for row in rows if row["layout"] == "dp2")
    assert "has neither layers that hand on hidden states" in rows[1]["reason"]
    printed = capsys.readouterr().out
    assert "same: 2, refused: 2" in printed
    assert "has neither layers that hand on hidden states" in " ".join(printed.split())


def test_a_layout_that_fails_is_a_row_and_the_others_go_on(
    jobs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = api._on_ranks

    def fail(function: Callable[..., Any], ready: door.Ready, *arguments: Any) -> Any:
        if ready.layout.size == 2 and "replicate" in ready.layout.split_axes():
            raise RankFailedError(1, "ValueError: planted")
        return ranks(function, ready, *arguments)

    monkeypatch.setattr(api, "_on_ranks", fail)
    assert main(["verify", jobs[0], "--layouts", "dp2, recompute=full"]) == 1
    printed = capsys.readouterr().out
    assert "ValueError: planted" in printed
    assert "failed: 1, same: 1" in printed


MORE = "pp2 tp2"  # which tests/test_checkpoint_layouts.py trains
PAIRS = [layout for layout in matrix.FAST if Layout.parse(layout).size == 2]
HYBRIDS = [layout for layout in matrix.FAST if layout not in PAIRS and layout != MORE]


@pytest.mark.processes
@pytest.mark.parametrize(
    "layouts",
    [PAIRS, pytest.param(HYBRIDS, marks=pytest.mark.slow), pytest.param([MORE], marks=pytest.mark.slow)],
    ids=["pairs", "hybrids", "more"],
)
def test_the_fast_set_takes_the_same_step(layouts: list[str]) -> None:
    recipe = samestep.Recipe(task=Tiny(name="llama"), batch=10, steps=2, optimizer=samestep.AdamW(lr=1e-2))
    rows = api.verify_layouts(Job(recipe=recipe, run=Run(threads=1, check=False)), layouts, steps=2)
    assert {row.layout: row.verdict for row in rows} == dict.fromkeys(layouts, "same"), [row.words for row in rows]


@pytest.mark.processes
def test_each_shipped_task_takes_the_same_step(tmp_path: Path) -> None:
    files = [EXAMPLES / f"{name}.yaml" for name in ("text", "language", "images", "regression")]
    report = tmp_path / "matrix.json"
    assert main(["verify", *map(str, files), "--layouts", "dp2", "--steps", "2", "--json", str(report)]) == 0
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [(row["job"], row["verdict"]) for row in rows] == [(file.stem, "same") for file in files]


class Followed(nn.Module):
    """A net that writes down when it is followed without values."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            with self.notes.open("a", encoding="utf-8") as file:
                file.write("followed\n")
        return self.net(x)


class FollowedPoints(Points):
    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def model(self) -> nn.Module:
        return Followed(self.notes)


@pytest.mark.processes
def test_a_model_is_followed_once_a_rank_for_all_layouts_of_a_size(tmp_path: Path) -> None:
    task = FollowedPoints(tmp_path / "notes")
    recipe = samestep.Recipe(task=task, batch=10, steps=2, optimizer=samestep.AdamW(lr=1e-2))
    layouts = ["fsdp2", "zero1x2", "tp2"]
    rows = api.verify_layouts(Job(recipe=recipe, run=Run(threads=1, check=False)), layouts, steps=2)
    assert {row.layout: row.verdict for row in rows} == dict.fromkeys(layouts, "same"), [row.words for row in rows]
    assert len(task.notes.read_text(encoding="utf-8").splitlines()) == 2


class RefusedByOne(nn.Linear):
    """A layer that one rank of several refuses in a pipeline."""

    def forward(self, input: Tensor) -> Tensor:
        in_stage = any(Path(frame.filename).parent.name == "pipeline" for frame in traceback.extract_stack())
        if in_stage and dist.get_world_size() > 1 and dist.get_rank() == 1:
            raise samestep.UserError("planted on rank 1")
        return super().forward(input)


class RefusedByOnePoints(Points):
    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def model(self) -> nn.Module:
        if dist.is_initialized() and dist.get_world_size() > 1:
            with self.notes.open("a") as file:
                file.write("built\n")
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), RefusedByOne(4, self.classes))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_what_one_rank_refuses_ends_the_others_and_what_was_proved_stays(tmp_path: Path) -> None:
    task = RefusedByOnePoints(tmp_path / "notes")
    recipe = samestep.Recipe(task=task, batch=10, steps=2, optimizer=samestep.AdamW(lr=1e-2))
    job = Job(recipe=recipe, run=Run(threads=1, check=False))
    rows = api.verify_layouts(job, ["dp2", "zero1x2", "pp2", "fsdp2"], steps=2)
    expected = ["same", "same", "refused", "same"]
    assert [row.verdict for row in rows] == expected, [row.words for row in rows]
    assert "planted on rank 1" in (rows[2].reason or "")
    # Three layouts in the first start, one alone, and one in the last; on two ranks each.
    assert len(task.notes.read_text().splitlines()) == 2 * (3 + 1 + 1)


def test_the_sets_are_layouts_of_at_most_eight_ranks() -> None:
    assert set(matrix.FAST) <= {*matrix.ALL, "pp2"}
    assert all(Layout.parse(text).size <= 8 for text in (*layouts_of("all"), *layouts_of("fast")))
    assert layouts_of(" dp2,fsdp2 tp2 ") == ["dp2", "fsdp2 tp2"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", UserError, 'names no layout; use all, fast, experts or "dp2, fsdp2 tp2"'),
        (",", UserError, "names no layout"),
        ("dp2, dq2", LayoutError, '"dq2" is not a part of a layout'),
    ],
)
def test_wrong_lists_are_refused(text: str, error: type[UserError], message: str) -> None:
    with pytest.raises(error) as refused:
        layouts_of(text)
    assert message in str(refused.value)


def test_a_second_job_file_wants_a_list_of_layouts(jobs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *jobs]) == 2
    assert "is a second job file; a list of layouts takes them" in capsys.readouterr().err


@pytest.mark.processes
def test_where_all_layouts_are_refused_each_is_named(jobs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", jobs[0], "--layouts", "single, cp2, tp2"]) == 2
    error = capsys.readouterr().err
    for layout in ("single", "cp2", "tp2"):
        assert f'layout "{layout}"' in error
