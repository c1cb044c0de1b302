"""A job's way through the door: its layout is read once, each check is made once, and the task is built once."""

import inspect
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import samestep
from samestep import door
from samestep.job import Job, Run
from samestep.launch import fork_server, local
from samestep.layout import Layout
from samestep.options import Options, OwnLoopOptions
from samestep.recipe import Recipe
from samestep.training import fit

pytestmark = pytest.mark.quick

HERE = Path(__file__).parent
JOB: dict[str, Any] = {"task": f"{HERE}/small_tasks.py:Points", "batch": 10, "steps": 2}

# A start has several of what these look at, or looks again where another process may have changed it meanwhile.
REPEATED = {
    "launch.device.check_devices": "a process group: the contract's, and that of the ranks",
    "launch.device.check_ranks_here": "likewise",
    "training.model_checks.check_model": "a model: two of the contract, compared, and the rank's",
    "training.model_checks.check_memory": "likewise",
    "tasks.turns.check_parameters": "a model: the contract's and the rank's",
    "training.optimizer.OptimizerPlan._check": "likewise",
    "parallel.exact.dropout._check": "likewise",
    "training.earlier_run.check_earlier_run": "a folder, and again once its lease is held",
    "tasks.base.check_samples": "a data set: for training, and held out",
    "contract.step.check_total": "a loss: in float32 and in float64",
    "private_folders._Walk._check_owner": "a folder and those above it",
    "private_folders._check_writers": "likewise",
    "layout.Layout.check_batch": "a batch, and again by the loader that cuts it",
}


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Count the calls of samestep's functions in this process, by module and name."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith("samestep."):
            counts[f"{module}.{frame.f_code.co_qualname}".removeprefix("samestep.")] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def repeated(counts: Counter[str]) -> dict[str, int]:
    """The checks that were made more than once, without those that look at several things."""
    checks = {name: number for name, number in counts.items() if re.match(r"_?check(_|$)", name.rpartition(".")[2])}
    return {name: number for name, number in checks.items() if number > 1 and name not in REPEATED}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Starts a job's training by its layout, of one process up to the first step, of several up to their ranks."""

    class StartedError(Exception):
        pass

    def started(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr(fork_server, "start_early", lambda modules, ranks: None)
    monkeypatch.setattr(fit, "take_all_steps", started)
    monkeypatch.setattr(local, "train", started)
    numbers = count()

    def train(layout: str) -> None:
        folder = tmp_path / str(next(numbers))
        with pytest.raises(StartedError):
            samestep.train(samestep.Recipe(**JOB), layout=layout, folder=folder, device="cpu", threads=1)

    return train


def test_each_check_is_made_once_a_start(start: Callable[[str], None]) -> None:
    start("single")  # the first imports what takes many calls
    once = [
        "layout.Layout.parse",
        "door.layouts.settle",
        "door.preflight.preflight",
        "door.entry.hold_contract",
        "contract.check.check_contract",
        "tasks.registry.resolve",
        *(f"engines.checks.{name}" for name in ("check_layout", "check_job", "check_task_needs", "check_gather")),
    ]
    for layout in ("single", "dp2"):
        with calls_counted() as counts:
            start(layout)
        assert repeated(counts) == {}
        assert {name: counts[name] for name in once} == dict.fromkeys(once, 1)


@contextmanager
def files_given(layout: str) -> Iterator[set[str]]:
    """The modules of samestep with a function that gets a layout, as text or parsed, in this process."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith("samestep."):
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(value := frame.f_locals.get(name), Layout) or value == layout for name in names):
                files.add(module)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def test_a_layout_passes_through_few_files_before_ranks_start(start: Callable[[str], None]) -> None:
    start("single")
    with files_given("dp2") as files:
        start("dp2")
    assert "samestep.layout" in files
    assert len(files) <= 20, sorted(files)  # 12 as this is written


def test_a_process_builds_its_task_once_and_sends_none() -> None:
    ready = door.check(Job(recipe=samestep.Recipe(**JOB), run=Run(device="cpu")))
    assert ready.task is ready.of(ready.job).task
    sent: door.Ready = pickle.loads(pickle.dumps(ready))
    assert (sent.job, sent.layout) == (ready.job, ready.layout)
    assert sent.task is not ready.task
    assert sent.task is sent.task


def test_options_are_a_job_s_keys_of_the_same_names() -> None:
    """Each key of a job that is an option as well, set to another value than its default, arrives."""
    recipe: dict[str, Any] = {"precision": "bf16", "clip": 2.0, "seed": 7, "master_weights": True, "batch": 12}
    run: dict[str, Any] = {"micro_batch": 3, "workers": 1, "compile": True, "bucket_mb": 2.0, "sparse_rows": "off"}
    job = Job(recipe=samestep.Recipe(task="regression", steps=1, **recipe), run=Run(**run))
    options = Options.of(job)
    assert {name: getattr(options, name) for name in (*recipe, *run)} == {**recipe, **run}
    assert options.virtual_ranks is None
    ordered = replace(job, run=replace(job.run, reduction="ordered"))
    assert Options.of(ordered).virtual_ranks == job.recipe.virtual_ranks
    named = {field.name for field in fields(Options)} - {"virtual_ranks", "late_parameters"}
    assert named <= {field.name for field in (*fields(Recipe), *fields(Run))}


def test_a_session_takes_the_options_of_a_loop_of_one_s_own() -> None:
    parameters = inspect.signature(samestep.session).parameters
    assert {field.name for field in fields(OwnLoopOptions)} < parameters.keys()
    with pytest.raises(TypeError, match=r"session\(\) got an unexpected keyword argument 'communication'"):
        samestep.session(communication=None)  # pyright: ignore[reportCallIssue]
    with samestep.session("single", precision="fp64", seed=3, device="cpu", threads=1) as session:
        assert session.options == Options(precision="fp64", seed=3)
