"""Two trainings in one folder: one trains and has its right weights, the other is told who holds the folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from small_jobs import slow_job, steps_in, wait_until

import samestep
from samestep import CheckpointError, jobfile
from samestep.api import train_job
from samestep.fault_tolerance import lease
from samestep.fault_tolerance.lease import FolderInUseError, hold
from samestep.fault_tolerance.lease_owner import Owner
from samestep.run_folder import MODEL_FILE

STEPS = 24
A_STEP = 0.2  # seconds: five that begin beside a training meet it while it lasts

# Imports samestep once, and forks a process for each training: an import takes longer than they do.
FORKS = """
import json, os, select, sys
import torch._dynamo  # which an optimizer's first step imports, in each fork again
import samestep.api
from samestep.cli.main import main

def child(start):
    os.setsid()
    os.chdir(start["folder"])
    output = os.open(start["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = main(start["words"])
    sys.stdout.flush()
    os._exit(code)

names = {}
while True:
    if select.select([sys.stdin.buffer.raw], [], [], 0.02)[0]:
        line = sys.stdin.buffer.raw.readline()
        if not line:
            break
        start = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(start)
        names[pid] = start["name"]
        print(json.dumps([start["name"], "pid", pid]), flush=True)
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        print(json.dumps([names.pop(pid), "code", os.waitstatus_to_exitcode(status)]), flush=True)
"""


@dataclass
class Programs:
    """`samestep train` in processes of their own."""

    folder: Path
    server: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, words: Sequence[str], folder: Path | None = None) -> None:
        assert self.server.stdin is not None
        start = {"name": name, "words": ["train", *words], "output": str(self._output(name))}
        self.server.stdin.write(json.dumps({**start, "folder": str(folder or self.folder)}) + "\n")
        self.server.stdin.flush()
        while name not in self.pids:
            self._read()

    def code(self, name: str) -> int:
        while name not in self.codes:
            self._read()
        return self.codes[name]

    def code_so_far(self, name: str) -> int | None:
        return self.codes.get(name)

    def said(self, name: str) -> str:
        return self._output(name).read_text(encoding="utf-8")

    def _output(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def _read(self) -> None:
        assert self.server.stdout is not None
        name, what, value = json.loads(self.server.stdout.readline())
        (self.pids if what == "pid" else self.codes)[name] = value


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def programs(tmp_path: Path, server: subprocess.Popen[str]) -> Iterator[Programs]:
    programs = Programs(tmp_path, server)
    yield programs
    for name, pid in programs.pids.items():
        if name not in programs.codes:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            programs.code(name)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """A job that is saved after every second step."""
    return str(slow_job(tmp_path, steps=STEPS, seconds=A_STEP, run={"checkpoint": {"every": 2}}))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the job alone."""
    folder = tmp_path_factory.mktemp("alone")
    file = slow_job(folder, steps=STEPS, seconds=0)
    return weights(train_job(jobfile.load(file, [("run.folder", str(folder / "run"), "test")]).job).folder)


def weights(run: Path) -> bytes:
    return (run / MODEL_FILE).read_bytes()


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*") if not path.suffix)


def leases(run: Path) -> list[Path]:
    return [*run.rglob(".lease-*")]


def in_use(programs: Programs, owner: str, folder: str = "run") -> str:
    holder = f"host {os.uname().nodename}, process {programs.pids[owner]}"
    return f"samestep: {folder} is in use by another training ({holder}, since 20"


def test_two_new_ones_at_once(programs: Programs, slow: str, right: bytes) -> None:
    for name in ("one", "two"):
        programs.start(name, [slow, "--folder", "run"])
    codes = {name: programs.code(name) for name in ("one", "two")}
    assert sorted(codes.values()) == [0, 2], [programs.said(name) for name in codes]
    winner, loser = sorted(codes, key=lambda name: codes[name])
    assert programs.said(loser).startswith(in_use(programs, winner))
    assert len(programs.said(loser).splitlines()) == 1
    assert weights(programs.folder / "run") == right
    assert leases(programs.folder / "run") == []


@pytest.mark.slow
def test_two_new_ones_without_a_folder_have_one_each(programs: Programs, slow: str, right: bytes) -> None:
    for name in ("one", "two"):
        programs.start(name, [slow])
    assert [programs.code(name) for name in ("one", "two")] == [0, 0]
    runs = sorted((programs.folder / "runs").iterdir())
    assert [run.name for run in runs] == ["job", "job-2"]
    assert [weights(run) for run in runs] == [right, right]


@pytest.mark.slow
def test_others_beside_a_running_one_and_two_that_resume_at_once(programs: Programs, slow: str, right: bytes) -> None:
    run = programs.folder / "run"
    programs.start("first", [slow, "--folder", "run"])
    wait_until(lambda: len(saved(run)) >= 2, told=lambda: programs.said("first"))
    beside = {
        "new": [],
        "forced": ["--force"],
        "resumed": ["--resume"],
        "requeued": ["--set", "run.checkpoint.resume=auto"],
        "its checkpoints": ["--folder", "other", "--set", "run.checkpoint.folder=run/checkpoints", "--resume"],
    }
    for name, words in beside.items():
        programs.start(name, [slow, *([] if "--folder" in words else ["--folder", "run"]), *words])
    for name in beside:
        assert programs.code(name) == 2
        folder = "run" if name != "its checkpoints" else "run/checkpoints"
        assert programs.said(name).startswith(in_use(programs, "first", folder)), programs.said(name)
    assert not (programs.folder / "other").exists()
    assert programs.code_so_far("first") is None

    os.killpg(programs.pids["first"], signal.SIGKILL)
    assert programs.code("first") == -signal.SIGKILL
    assert leases(run) != []
    for name in ("one", "two"):
        programs.start(name, [slow, "--folder", "run", "--resume"])
    codes = {name: programs.code(name) for name in ("one", "two")}
    assert sorted(codes.values()) == [0, 2], [programs.said(name) for name in codes]
    winner, loser = sorted(codes, key=lambda name: codes[name])
    assert "goes on from" in programs.said(winner)
    assert "sign of life" not in programs.said(winner)  # the process of the first one is gone: nobody waits
    assert programs.said(loser).startswith(in_use(programs, winner))
    assert weights(run) == right
    assert leases(run) == []


def test_one_that_was_suspended_notices_that_another_took_over(programs: Programs, slow: str) -> None:
    run = programs.folder / "run"
    programs.start("first", [slow, "--folder", "run"])
    wait_until(lambda: len(saved(run)) >= 2, told=lambda: programs.said("first"))
    os.killpg(programs.pids["first"], signal.SIGSTOP)
    time.sleep(lease.BEAT)  # it looks at its lease after every step, unless it has just done so
    other = replace(Owner.here(60), host="node-7").content(0)
    (run / ".lease-2").write_bytes(other)
    before = saved(run), steps_in(run)
    os.killpg(programs.pids["first"], signal.SIGCONT)
    assert programs.code("first") == 2
    assert "run was taken over by another training (host node-7, process" in programs.said("first")
    assert "this one ends and writes nothing more there" in programs.said("first")
    assert (saved(run), steps_in(run)) == before
    assert leases(run) == [run / ".lease-2"]
    assert (run / ".lease-2").read_bytes() == other
    assert not (run / MODEL_FILE).exists()


def test_a_folder_that_is_deleted_ends_the_training_in_a_message(programs: Programs, slow: str) -> None:
    run = programs.folder / "run"
    programs.start("first", [slow, "--folder", "run"])
    wait_until(lambda: steps_in(run) >= 1, told=lambda: programs.said("first"))
    shutil.rmtree(run, ignore_errors=True)
    wait_until(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists())
    assert programs.code("first") != 0
    assert "Traceback" not in programs.said("first")
    assert "run" in programs.said("first").splitlines()[-1]


def test_a_session_holds_the_folder_that_it_saves_into(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        with samestep.session("single", threads=1, device="cpu") as session:
            model = torch.nn.Linear(2, 1)
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            session.save(folder, step=1)
            with pytest.raises(FolderInUseError), hold([folder]):
                pass

    save(tmp_path / "own")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-1"]
    with (
        hold([tmp_path / "others"]),
        pytest.raises(CheckpointError, match=r"session.save: .*others is in use by another training"),
    ):
        save(tmp_path / "others")


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_of_one_start_at_once_and_are_killed(tmp_path: Path, right: bytes) -> None:
    """Two ranks: the process that starts them holds the folder, and a restart of its ranks keeps it."""
    inject = [{"rank": 0, "step": 5, "fault": "kill"}]
    run = {"checkpoint": {"every": 2}, "layout": "dp2", "max_restarts": 1, "inject": inject, "folder": "run"}
    file = slow_job(tmp_path, steps=STEPS, seconds=A_STEP, run=run)
    words = [sys.executable, "-m", "samestep", "train", str(file)]
    both = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    loser, winner = sorted(said, key=len)
    assert loser.startswith("samestep: run is in use by another training")
    assert "failed in step 5" in winner
    assert steps_in(tmp_path / "run") == STEPS
    assert leases(tmp_path / "run") == []
