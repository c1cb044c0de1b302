"""How a rank ended is named truly: by whom, and why, as far as anything tells; and nothing waits for ever."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ending_tasks import Ending, Slow
from small_jobs import faults_in, wait_until

import samestep
from samestep.doctor.run import faults
from samestep.doctor.run_files import read_run
from samestep.fault_tolerance import stopped
from samestep.launch import endings

slow = pytest.mark.slow


def train(folder: Path, task: samestep.Task, layout: str = "dp2", **run: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=task, batch=16, steps=6, precision="fp64")
    return samestep.train(recipe, layout=layout, folder=folder, threads=1, log=(), check=False, device="cpu", **run)


def failure(folder: Path, how: str, layout: str = "dp2", **run: Any) -> samestep.RankFailedError:
    with pytest.raises(samestep.RankFailedError) as caught:
        train(folder, Ending(how=how), layout, **run)
    return caught.value


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("os._exit 0", "its process ended with exit code 0 while the other ranks still needed it"),
        pytest.param("signal SIGTERM", "ended by SIGTERM: somebody told it to end", marks=slow),
        pytest.param(
            "sys.exit 0",
            r"^the training called sys\.exit\(0\) before its end, at .*ending_tasks\.py:\d+; raise an error",
            marks=slow,
        ),
        pytest.param(
            "raise KeyboardInterrupt",
            r"^the rank raised KeyboardInterrupt before its end, at .*ending_tasks\.py:\d+; raise an error",
            marks=slow,
        ),
        pytest.param("os._exit 7", "its process ended with exit code 7 and gave no reason", marks=slow),
        pytest.param("signal SIGKILL", r"SIGKILL: by the kernel if memory ran out .*, or by somebody", marks=slow),
        pytest.param("signal SIGBUS", r"ended by SIGBUS: .* /dev/shm is full, of whose .* are free now", marks=slow),
        pytest.param("signal SIGXCPU", "ended by SIGXCPU: its processor time was spent", marks=slow),
    ],
)
def test_the_rank_that_ended_is_named_and_how(tmp_path: Path, how: str, reason: str) -> None:
    caught = failure(tmp_path, how)
    assert caught.rank == 1
    assert re.search(reason, caught.reason), caught.reason
    assert "Connection closed" not in caught.reason
    (fault,) = faults_in(tmp_path)
    assert (fault["rank"], fault["step"]) == (1, 2)


@slow
@pytest.mark.timeout(60)
def test_a_rank_alone_that_ends_well_too_early_leaves_nobody_waiting(tmp_path: Path) -> None:
    caught = failure(tmp_path, "os._exit 0", "single", max_restarts=1)
    assert "exit code 0" in caught.reason
    assert len(faults_in(tmp_path)) == 2  # in both rounds


@slow
@pytest.mark.timeout(60)
def test_a_killed_fork_server_is_named_and_the_next_round_has_another(tmp_path: Path) -> None:
    caught = failure(tmp_path, "server SIGKILL")
    assert re.search(r"the process that ranks are forked from \(pid \d+\) was ended by SIGKILL", caught.reason)
    assert "exit code 255" not in caught.reason


@slow
@pytest.mark.timeout(60)
def test_a_stopped_fork_server_is_named_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(samestep.RankFailedError):
        train(tmp_path / "rank", Ending(how="server SIGSTOP"), hang_limit=4)  # the rank itself sleeps
    told = capfd.readouterr().err
    assert re.search(
        r"the process that ranks are forked from \(process \d+\) is stopped \(SIGSTOP\) for [23] s; "
        r"samestep has let it go on",
        told,
    )


PROGRAM = """\
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
time.sleep(60)
"""

FIRST_LEAVES = """\
import datetime, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
dist.barrier()
if dist.get_rank() == 1:
    os._exit(0)
time.sleep(0.5)
dist.all_reduce(torch.ones(1))
"""


def launch(
    folder: Path, script: str, *words: str, by: Sequence[str] = ("-m", "samestep")
) -> subprocess.CompletedProcess[str]:
    """Launch a program on two ranks, by samestep's command or a program that calls it."""
    (folder / "program.py").write_text(script, encoding="utf-8")
    command = [sys.executable, *by, "launch", "--num-procs", "2", "--device", "cpu", "--logs", "logs"]
    return subprocess.run(
        [*command, "--", "program.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_program_that_leaves_early_is_named_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    ended = launch(tmp_path, FIRST_LEAVES)
    assert ended.returncode == 1
    assert "rank 1 on " in ended.stderr
    assert "failed first: its process ended with exit code 0 while the other ranks still needed it" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGKILL", marks=slow)])
def test_a_program_that_somebody_ended_is_named(tmp_path: Path, name: str) -> None:
    ended = launch(tmp_path, PROGRAM, name)
    assert ended.returncode == 1
    assert re.search(rf"rank 1 on \S+ failed first: its process was ended by {name}: ", ended.stderr), ended.stderr


@pytest.mark.timeout(60)
def test_a_rank_that_has_not_saved_in_time_is_ended_by_samestep_and_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Slow(seconds=20, begun=str(tmp_path))
    starter = os.getpid()
    helper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import glob, os, signal, time\nwhile len(glob.glob('{tmp_path}/begun-*')) < 2: time.sleep(0.05)\n"
            f"os.kill({starter}, signal.SIGINT)",
        ]
    )
    try:
        with pytest.raises(samestep.InterruptedJobError):
            train(tmp_path / "run", task, checkpoint={"every": 2}, grace_period=1)
    finally:
        helper.wait(20)
    told = capfd.readouterr().err
    assert "samestep ended it by SIGKILL: it had not saved and ended within 1 s of SIGINT (run.grace_period)" in told
    assert "memory" not in told
    (fault,) = faults_in(tmp_path / "run")
    assert "run.grace_period" in fault["cause"]
    (tmp_path / "run" / "metrics.jsonl").touch()
    (finding,) = faults(read_run(tmp_path / "run"))
    assert finding.remedy is not None
    assert "memory" not in finding.remedy
    assert "a longer run.grace_period" in finding.remedy


SHORT = """\
import sys
from samestep.cli.main import main
from samestep.fault_tolerance import stopped

stopped._LIMIT = 3.0
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_program_that_stops_itself_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT, encoding="utf-8")
    ended = launch(tmp_path, PROGRAM, "SIGSTOP", by=("short.py",))
    assert ended.returncode == 1
    assert re.search(
        r"rank 1 \(process \d+\) is stopped \(SIGSTOP\) for \d s; kill -CONT \d+ lets it go on", ended.stderr
    )
    assert re.search(r"it hung: its process \(\d+\) was stopped \(SIGSTOP\)", ended.stderr), ended.stderr


@pytest.mark.timeout(60)
def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            assert not stopped.is_stopped(child.pid)
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: stopped.is_stopped(child.pid), 10)
        finally:
            child.kill()
    assert not stopped.is_stopped(child.pid)


def test_the_kernel_is_named_where_it_tells_so(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 3\n", encoding="ascii")
    kills = endings.OutOfMemoryKills(tmp_path, tmp_path / "log")
    assert not kills.has_killed(4711)
    (tmp_path / "log").write_text("4,1,1,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n")
    assert kills.has_killed(4711)
    assert not kills.has_killed(471)
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 4\n", encoding="ascii")
    assert kills.has_killed(471)
    told = endings.ended_by(signal.SIGKILL, out_of_memory=True)
    assert told.startswith("ended by SIGKILL: the kernel ended it as memory ran out")
