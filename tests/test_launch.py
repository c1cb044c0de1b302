"""Starting ranks on this machine: results come back, failures are named once, and nothing is left running."""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import assert_nothing_is_left, processes_alive
from listening import elsewhere, listening
from shown_pages import is_shown
from small_jobs import job_file, losses_alone, losses_in, slow_job, steps_in, wait_until
from small_tasks import Failing, Points

import samestep
from samestep.cli.main import main
from samestep.launch import local

TESTS = Path(__file__).parent
NTH = ("first", "second", "third")


def recipe(task: samestep.Task, **values: object) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=16, steps=6, **values)  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert_nothing_is_left()


def test_one_and_several_processes_reach_the_same_weights(tmp_path: Path) -> None:
    losses = {
        layout: samestep.train(recipe(Points(), precision="fp64"), layout=layout, folder=tmp_path / layout).losses
        for layout in ("single", "dp2", "dp3")
    }
    assert losses["dp2"] == pytest.approx(losses["single"], rel=1e-12)
    assert losses["dp3"] == pytest.approx(losses["single"], rel=1e-12)


def test_a_failing_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(samestep.RankFailedError, match="planted in rank 1") as caught:
        samestep.train(recipe(Failing(way="raise")), layout="dp3", folder=tmp_path)
    assert caught.value.rank == 1
    assert caught.value.reason.count("Traceback") == 1
    assert "small_tasks.py" in caught.value.reason


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(samestep.RankFailedError, match="SIGKILL") as caught:
        samestep.train(recipe(Failing(way="kill")), layout="dp2", folder=tmp_path)
    assert caught.value.rank == 1


def test_a_users_mistake_seen_in_a_rank_stays_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match=r"^the user's fault, seen late$"):
        samestep.train(recipe(Failing(way="user error")), layout="dp2", folder=tmp_path)


def test_a_task_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    task = Points()
    task.class_names = lambda: ["a"]  # type: ignore[method-assign]
    with pytest.raises(samestep.UserError, match="can't be sent to the ranks"):
        samestep.train(recipe(task), layout="dp2", folder=tmp_path)


JOB_FILE = """
recipe:
  task: {tests}/small_tasks.py:Failing
  args: {{way: slow, marker: {marker}}}
  batch: 16
  steps: 50
run: {{layout: dp2, device: cpu, folder: {folder}, check: false, log: []}}
"""


def start_job(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a job by the command line, in a process group of its own, and wait until its ranks train."""
    marker = tmp_path / "marker"
    job = tmp_path / "job.yaml"
    job.write_text(JOB_FILE.format(tests=TESTS, marker=marker, folder=tmp_path / "run"), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "train", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")},
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not marker.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the job did not get to its third step: {process.communicate()}")
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("number", "to_the_group", "exit_code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="Ctrl-C"),
        pytest.param(signal.SIGINT, False, 130, id="SIGINT to the parent", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 143, id="SIGTERM to the parent", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_ranks_within_seconds(
    tmp_path: Path, number: signal.Signals, to_the_group: bool, exit_code: int
) -> None:
    process = start_job(tmp_path)
    sockets = listening(psutil.Process(process.pid))
    began = time.monotonic()
    if to_the_group:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == exit_code
    assert time.monotonic() - began < 20  # of ranks that sleep for a minute
    assert "Traceback" not in errors
    # Nobody on another host could have reached it.
    assert len(sockets) >= 3  # the store, and each rank's own
    assert elsewhere(sockets) == []


def colour_and_folder(start: str) -> tuple[str | None, str]:
    """Print a line to either stream; return a variable, and the folder that this rank works in."""
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{start} of rank {os.environ['RANK']}\n")  # at once, also where streams hold nothing back
        stream.flush()
    return os.environ.get("SAMESTEP_COLOUR"), str(Path.cwd())


def test_ranks_of_a_later_start_have_what_their_parent_has_then(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAMESTEP_COLOUR", "blue")
    assert local.start(colour_and_folder, ("first",), 2) == ("blue", str(Path.cwd()))
    monkeypatch.setenv("SAMESTEP_COLOUR", "red")
    monkeypatch.chdir("/")
    assert local.start(colour_and_folder, ("second",), 2) == ("red", "/")
    monkeypatch.delenv("SAMESTEP_COLOUR")
    assert local.start(colour_and_folder, ("third",), 2) == (None, "/")
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == sorted(f"{start} of rank {rank}" for start in NTH for rank in (0, 1))
    assert sorted(errors.splitlines()) == sorted(f"{start} of rank {rank}" for start in NTH for rank in (0, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_the_server_that_forks_has_one_thread() -> None:
    # A lock that another thread holds while a process is forked is held for ever in the new one.
    local.start(colour_and_folder, ("",), 2)
    (server,) = [each for each in psutil.Process().children() if "forkserver" in " ".join(each.cmdline())]
    assert server.num_threads() == 1


@pytest.mark.slow
def test_two_jobs_side_by_side_do_not_meet_and_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """One job begins and ends while the other takes its steps, whose parent is killed then."""
    folder, known = tmp_path / "slow", losses_alone()
    slow = slow_job(tmp_path, steps=2000, seconds=0.05, run={"layout": "dp2", "folder": str(folder)})
    with subprocess.Popen([sys.executable, "-m", "samestep", "train", str(slow)]) as other:
        try:
            wait_until(lambda: other.poll() is not None or steps_in(folder) >= len(known), limit=90)
            before = steps_in(folder)
            job = job_file(tmp_path, "job", run={"layout": "dp2", "folder": str(tmp_path / "run")})
            assert main(["train", str(job)]) == 0
            wait_until(lambda: other.poll() is not None or steps_in(folder) > before)
            assert other.poll() is None
            assert len(processes_alive()) >= 3  # the parent, and its ranks, which `nothing_is_left_running` looks for
        finally:
            other.kill()
    assert losses_in(tmp_path / "run") == pytest.approx(known, rel=1e-12)
    assert losses_in(folder)[: len(known)] == pytest.approx(known, rel=1e-12)


def test_the_same_file_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = str(TESTS.parent / "examples" / "regression.yaml")
    command = [*torchrun, "-m", "samestep", "train", job, "--layout", "ddp", "--folder", str(tmp_path)]
    command += ["--set", "run.log=[]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert lines == [f"rank {rank}: 64 steps x 32 samples x 2 ranks = 4,096" for rank in (0, 1)]
    assert done.stdout.count("mean squared error") == 1


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = str(TESTS.parent / "examples" / "regression.yaml")
    command = [*torchrun, "-m", "samestep", "train", job, "--layout", "dp3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count('samestep: layout "dp3" needs 3 processes, not 2') == 1


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import samestep\n"
        "from small_tasks import Unscored\n"
        # A task of more bytes than a pipe takes: starting a rank that dies at once must not wait for it.
        "recipe = samestep.Recipe(task=Unscored(samples=5000), batch=64, steps=2)\n"
        f"samestep.train(recipe, layout='dp2', check=False, folder={str(tmp_path / 'run')!r})\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False, env=environment
    )
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert "in use by another training" not in done.stderr


def test_the_example_loop_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = TESTS.parent / "examples"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(examples))  # as for a script that is started
    runpy.run_path(str(examples / "own_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "accuracy 0.9" in printed
    assert is_shown("docs/own-tasks.md", printed)


@pytest.mark.slow
def test_the_example_in_python_runs(tmp_path: Path) -> None:
    script = TESTS.parent / "examples" / "train_in_python.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy 0.9" in done.stdout
    assert is_shown("docs/own-tasks.md", done.stdout)


@pytest.mark.slow
def test_the_example_loop_takes_the_same_steps_under_torchrun(tmp_path: Path) -> None:
    script = str(TESTS.parent / "examples" / "own_loop.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    outputs = [
        subprocess.run([*start, script], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path).stdout
        for start in ([sys.executable], torchrun)
    ]
    assert outputs[0] == outputs[1]
