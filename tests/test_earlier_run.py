"""What a training finds in its folder: an earlier run is never replaced without being told."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_jobs import job_file, steps_in
from small_tasks import Unscored
from torch import Tensor

import samestep
from samestep.cli.main import main

TESTS = Path(__file__).parent

pytestmark = pytest.mark.quick

FINISHED = ("report.json", "model.safetensors", "metrics.jsonl", "evaluations.jsonl")
STEPS = 4


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*words: str, checkpoint: Mapping[str, Any] | None = None, **run: Any) -> int:
    run = {**run, **({} if checkpoint is None else {"checkpoint": checkpoint})}
    file = job_file(Path(), run=run, steps=STEPS)
    return main(["train", str(file), "--no-check", "--folder", "run", *words])


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("run").rglob("*")) if path.is_file()}


def interrupted() -> None:
    """What a run leaves that was killed before its first checkpoint."""
    Path("run/logs").mkdir(parents=True)
    Path("run/metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n", encoding="utf-8")


AUTO, LAST = ["--set", "run.checkpoint.resume=auto"], ["--resume"]


def test_a_finished_run_is_never_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    before = contents()
    assert {f"run/{name}" for name in FINISHED} <= before.keys()
    for words in ([], AUTO, LAST):
        capsys.readouterr()
        assert train(*words) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        if words != LAST:
            assert "run holds a finished run (report.json)" in told
            assert "name another folder, or have it replaced with --force (run.overwrite: true)" in told
        assert contents() == before
    with pytest.raises(samestep.UserError, match="holds a finished run"):
        samestep.train(samestep.Recipe(task="regression", batch=10, steps=1), folder="run")
    assert contents() == before


@pytest.mark.parametrize("kept", FINISHED)
def test_each_file_of_a_run_counts(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the user has removed the others, or a file of that name is the user's own."""
    Path("run").mkdir()
    Path("run", kept).write_text("mine\n", encoding="utf-8")
    assert train() == 2
    assert f"run ({kept})" in capsys.readouterr().err.replace(" without checkpoints", "")
    assert Path("run", kept).read_text(encoding="utf-8") == "mine\n"


def test_force_replaces_a_run_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(checkpoint={"every": 2}) == 0
    Path("run/notes.txt").write_text("mine\n", encoding="utf-8")
    Path("run/checkpoints/notes.txt").write_text("mine\n", encoding="utf-8")
    Path("run/faults.jsonl").write_text("{}\n", encoding="utf-8")
    before = contents()
    capsys.readouterr()
    assert train(checkpoint={"every": 2}) == 2
    assert "run/checkpoints holds checkpoints of a training, up to step 4; resume: auto (--resume)" in (
        capsys.readouterr().err
    )
    assert contents() == before
    assert train("--force", "--set", "recipe.steps=3", checkpoint={"every": 3}) == 0
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["notes.txt", "step-3"]
    assert steps_in(Path("run")) == 3
    assert Path("run/notes.txt").read_text(encoding="utf-8") == "mine\n"
    assert not Path("run/faults.jsonl").exists()
    recipe = samestep.Recipe(task="regression", batch=10, steps=1)
    assert samestep.train(recipe, folder="run", overwrite=True, log=()).steps == 1
    assert not Path("run/checkpoints/step-3").exists()


def test_force_removes_no_checkpoint_with_other_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(checkpoint={"every": 2}) == 0
    Path("run/checkpoints/step-2/notes.txt").write_text("mine\n", encoding="utf-8")
    assert train("--force") == 2
    assert "run/checkpoints/step-2 holds more than a checkpoint, and is not removed" in capsys.readouterr().err
    assert Path("run/checkpoints/step-2/notes.txt").exists()


def test_force_with_resume_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A requeued job has the same command at every start."""
    assert train("--force", *AUTO, checkpoint={"every": 2}) == 0
    assert train("--force", *AUTO, "--set", "recipe.steps=6", checkpoint={"every": 2}) == 0
    assert "goes on from" in capsys.readouterr().err
    assert steps_in(Path("run")) == 6


@pytest.mark.parametrize(
    "there", ["nothing", "an empty folder", "other files", "an interrupted run", "a finished run"]
)
def test_resume_by_hand_needs_a_checkpoint(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    if there == "an interrupted run":
        interrupted()
    elif there == "a finished run":
        assert train() == 0
    elif there != "nothing":
        Path("run").mkdir()
    if there == "other files":
        Path("run/notes.txt").write_text("mine\n", encoding="utf-8")
    before = contents()
    capsys.readouterr()
    assert train(*LAST) == 2
    told = capsys.readouterr().err
    assert "--resume: run/checkpoints has no checkpoint to go on from; name the folder of a run that has one" in told
    assert len(told.splitlines()) == 1
    assert contents() == before
    assert Path("run").exists() == (there != "nothing")
    assert ("--force" in told) == there.endswith(" run")  # without it --force is what begins at step 0
    assert train(*(["--force"] if "--force" in told else [])) == 0


def test_resume_by_hand_without_a_folder_needs_a_run_that_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(job_file(Path(), steps=STEPS))
    assert main(["train", file, "--no-check", "--resume"]) == 2
    assert "--resume: runs/job/checkpoints has no checkpoint to go on from" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "other files", "an interrupted run"])
def test_what_a_scheduler_starts_begins_and_says_so(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    if there == "an interrupted run":
        interrupted()
    elif there != "nothing":
        Path("run").mkdir()
    if there == "other files":
        Path("run/slurm-17.out").write_text("mine\n", encoding="utf-8")
    assert train(*AUTO) == 0
    assert "samestep: no checkpoint in run/checkpoints yet: starts at step 0" in capsys.readouterr().err
    assert steps_in(Path("run")) == STEPS
    assert train(*AUTO) == 0  # it is saved after its last step, and has nothing left to do
    assert "goes on from run/checkpoints/step-4, after step 4" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_what_a_launcher_starts_again_replaces_its_own_records(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted()
    assert train() == 2
    assert "an interrupted run without checkpoints (metrics.jsonl)" in capsys.readouterr().err
    monkeypatch.setenv(variable, "1")
    assert train("--force") == 0
    capsys.readouterr()
    assert train("--force") == 2  # what --force removes, it removes at the first start alone
    assert "holds a finished run" in capsys.readouterr().err


def test_another_runs_checkpoint_goes_on_in_a_folder_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(checkpoint={"every": 2}) == 0
    start = ["--resume", "run/checkpoints/step-2"]
    assert train(*start, "--folder", "other") == 0
    assert "goes on from run/checkpoints/step-2" in capsys.readouterr().err
    assert train(*start, "--folder", "other") == 2
    assert "other/checkpoints holds checkpoints of a training, up to step 4" in capsys.readouterr().err
    assert train(*start) == 0  # one's own, from an earlier step


def test_a_profile_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("profile").mkdir()
    Path("profile/profile.json").write_text("{}\n", encoding="utf-8")
    assert train("--profile", "profile") == 2
    assert "run.profile.folder: profile/profile.json is there already" in capsys.readouterr().err


def test_a_resume_in_another_folder_of_a_training_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: {{task: {TESTS}/small_tasks.py:Unscored, batch: 8, steps: 2}}\n", encoding="utf-8")
    words = ["train", str(file), "--folder", str(tmp_path / "run"), "--checkpoint-every", "1", "--threads", "1"]
    assert main(words) == 0
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    capsys.readouterr()
    other = ["--folder", str(tmp_path / "other"), "--set", f"run.checkpoint.folder={tmp_path}/run/checkpoints"]
    assert main([*words, *other, "--resume"]) == 0
    assert "loss at" not in capsys.readouterr().out
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == weights


def test_a_job_that_is_refused_removes_no_earlier_run(tmp_path: Path) -> None:
    """The mistake is found before anything of the run in the folder is touched."""
    run = tmp_path / "run"
    samestep.train(samestep.Recipe(task=Unscored(), batch=8, steps=2), folder=run, log=(), check=False)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(samestep.UserError, match="batch"):
        samestep.train(samestep.Recipe(task=Unscored(), batch=1, steps=2), "dp2", folder=run, overwrite=True, log=())
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


class Ends(Unscored):
    """Ends in its first step, as a task with a mistake in its loss does, or a loss that is not finite."""

    def __init__(self, *, way: str) -> None:
        super().__init__()
        self.way = way

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        if self.way == "raises":
            raise ValueError("no such column")
        if self.way == "interrupted":
            raise KeyboardInterrupt
        loss, count = super().loss(output, batch)
        return loss * float("nan"), count


def run_of(task: Unscored, *, steps: int = 2, overwrite: bool = False, **run: Any) -> None:
    recipe = samestep.Recipe(task=task, batch=8, steps=steps, optimizer=samestep.AdamW(lr=0.01))
    samestep.train(recipe, folder="run", check=False, threads=1, overwrite=overwrite, **run)


@pytest.mark.parametrize("way", ["raises", "interrupted", "not finite"])
def test_a_training_that_ends_in_its_first_step_leaves_the_earlier_run(way: str) -> None:
    run_of(Unscored(), checkpoint={"every": 1})
    before = contents()
    with pytest.raises((ValueError, KeyboardInterrupt, samestep.NonFiniteError)):
        run_of(Ends(way=way), overwrite=True, checkpoint={"every": 1})
    after = contents()
    assert {name: after.get(name) for name in before} == before
    # Nothing is set aside any more, and nothing new looks as if it were of that run.
    assert after.keys() - before.keys() <= {"run/faults.jsonl"}
    run_of(Unscored(), steps=3, overwrite=True)
    assert not Path("run/checkpoints/step-1").exists()


def test_what_a_killed_start_has_set_aside_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(checkpoint={"every": 2}) == 0
    before = contents()
    aside = Path("run/.samestep-earlier-run")
    aside.mkdir()
    for name in FINISHED:
        Path("run", name).rename(aside / name)
    (Path("run/checkpoints") / aside.name).mkdir()
    Path("run/checkpoints/step-2").rename(Path("run/checkpoints") / aside.name / "step-2")
    Path("run/metrics.jsonl").touch()  # of the killed one
    assert train() == 2
    assert "holds checkpoints of a training, up to step 4" in capsys.readouterr().err
    assert train(*LAST, "--set", "recipe.steps=4") == 0
    assert {name: contents()[name] for name in before if "checkpoints" in name or "model" in name} == {
        name: value for name, value in before.items() if "checkpoints" in name or "model" in name
    }
    assert not aside.exists()


def test_what_can_not_be_removed_ends_the_new_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(Unscored(), checkpoint={"every": 1})
    before = contents()
    replace = Path.replace

    def refusing(path: Path, target: Path) -> Path:
        if path.parent.name == "checkpoints" and target.name.endswith(".removed"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(
        samestep.UserError, match=r"--force: run/checkpoints/\S+ can't be removed: Input/output error"
    ):
        run_of(Unscored(), steps=3, overwrite=True, checkpoint={"every": 1})
    assert contents() == before
