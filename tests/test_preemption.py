"""SIGTERM and Ctrl-C: the ranks finish a step, save, and end so that a scheduler starts the job again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_jobs import losses_in, steps_in, wait_until
from small_tasks import Slow

import samestep
from samestep.cli.main import main
from samestep.fault_tolerance import signals

TESTS = Path(__file__).parent
JOB = """
recipe:
  task: {tests}/small_tasks.py:Slow
  args: {{seconds: {seconds}}}
  batch: 16
  steps: {steps}
  precision: fp64
run:
  layout: {layout}
  folder: {folder}
  threads: 1
  log: []
  checkpoint: {{every: 1000}}
  {more}
"""
STEPS = 40
A_STEP = 0.04  # seconds, at least
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def command(
    place: Path, name: str, *, layout: str = "dp2", seconds: float = 0, more: str = "", start: Sequence[str] = ()
) -> list[str]:
    job = place / f"{name}.yaml"
    folder = place / "run"
    text = JOB.format(tests=TESTS, steps=STEPS, layout=layout, folder=folder, seconds=seconds, more=more)
    job.write_text(text, encoding="utf-8")
    return [sys.executable, *start, "-m", "samestep", "train", str(job)]


def interrupted(
    words: Sequence[str], folder: Path, number: signal.Signals, *, to_the_group: bool, after: int = 5
) -> tuple[int, str]:
    """Start a job, send a signal when it has taken some steps, and return its exit code and what it said."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 60
    while steps_in(folder) < after:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(f"the job took no steps: {process.communicate()}")
        time.sleep(0.02)
    if to_the_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, errors


def finished(words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What a job says that goes on to its end; started from this process, unless a launcher starts it."""
    capfd.readouterr()
    if words[1:3] == ["-m", "samestep"]:
        assert main(words[3:]) == 0
    else:
        subprocess.run(words, timeout=60, check=True)
    return capfd.readouterr().err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    recipe = samestep.Recipe(task=Slow(seconds=0), batch=16, steps=STEPS, precision="fp64")
    return samestep.train(recipe, folder=tmp_path_factory.mktemp("undisturbed"), log=()).losses


@pytest.mark.parametrize(
    ("number", "to_the_group", "layout", "start", "exit_code"),
    [
        pytest.param(signal.SIGTERM, False, "dp2", (), 143, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, "dp2", (), 143, id="SIGTERM to every process"),
        pytest.param(signal.SIGINT, True, "dp2", (), 130, id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, "single", (), 143, id="SIGTERM to one process", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, "dp2", TORCHRUN, 1, id="SIGTERM to torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_after_a_saved_step_and_the_next_start_goes_on_there(
    tmp_path: Path,
    undisturbed: tuple[float, ...],
    number: signal.Signals,
    to_the_group: bool,
    layout: str,
    start: Sequence[str],
    exit_code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    first = command(tmp_path, "first", layout=layout, seconds=A_STEP, start=start)
    code, errors = interrupted(first, folder, number, to_the_group=to_the_group)
    assert code == exit_code, errors
    done = steps_in(folder)
    assert done < STEPS, "the signal came too late"
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == [f"step-{done}"]
    again = finished([*command(tmp_path, "again", layout=layout, seconds=A_STEP, start=start), "--resume"], capfd)
    assert f"after step {done}" in again
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["first_step"] == done
    assert losses_in(folder) == pytest.approx(undisturbed, rel=1e-12)


@pytest.mark.slow
def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    words = command(tmp_path, "first", more="inject: {rank: 0, step: 5, fault: hang}")
    told = tmp_path / "told"
    with told.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(words, stderr=stream, start_new_session=True)
    try:
        wait_until(lambda: steps_in(tmp_path / "run") >= 4, 40)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "the ranks save and stop" in told.read_text(encoding="utf-8"), 30)
        # Signals that follow each other sooner count as one, by the job's own clock.
        time.sleep(2 * signals.SECOND_SIGNAL)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 143
    finally:
        process.kill()
    assert "Traceback" not in told.read_text(encoding="utf-8")


@pytest.mark.slow
def test_ranks_that_do_not_end_within_the_notice_are_ended(tmp_path: Path) -> None:
    words = command(tmp_path, "first", more="grace_period: 2\n  inject: {rank: 0, step: 5, fault: hang}")
    code, errors = interrupted(words, tmp_path / "run", signal.SIGTERM, to_the_group=False, after=4)
    assert code == 143
    assert "SIGTERM: the ranks save and stop" in errors
