"""Lines of progress of whole commands, whose output goes into a file or a pipe, and into a terminal."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from small_jobs import RECIPE, TESTS, job_file, slow_job, steps_in

from samestep.cli.main import main
from samestep.environment import progress_every

pytestmark = [
    pytest.mark.timeout(240),
    # PyTorch's elastic agent leaves them to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EVERY = 0.5  # seconds
SAMESTEP = (sys.executable, "-m", "samestep")


def timed_lines(words: Sequence[str], folder: Path) -> list[tuple[float, str]]:
    """The lines on a command's standard error, each with the seconds from its start; output goes to a file."""
    began = time.monotonic()
    with (
        (folder / "out").open("wb") as out,
        subprocess.Popen(words, stdout=out, stderr=subprocess.PIPE, cwd=folder, text=True) as process,
    ):
        assert process.stderr is not None
        lines = [(time.monotonic() - began, line) for line in process.stderr]
    assert process.returncode == 0, "".join(line for _, line in lines)
    assert all(line.endswith("\n") and not re.search(r"[\r\x1b]", line) for _, line in lines)
    return [(at, line.rstrip("\n")) for at, line in lines]


def without_still(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if ": still " not in line]


def in_order(lines: Sequence[str], *patterns: str) -> bool:
    """Whether lines that match the patterns come in their order, with others between them."""
    rest = iter(lines)
    return all(any(re.fullmatch(pattern, line) for line in rest) for pattern in patterns)


def longest_silence(lines: Sequence[tuple[float, str]]) -> float:
    times = [at for at, _ in lines]
    return max(after - before for before, after in pairwise(times))


RANK_0 = (
    r"train dp2: rendezvous of 2 ranks",
    r"train dp2: reading the data",
    r"train dp2: building the model",
    r"train dp2: applying layout dp2",
    r"train dp2: first step, 1/8",
    r"train dp2: step 1/8, loss \d+\.\d{4}, [\d.,]+ samples/s, 0:\d\d elapsed",
)
END = (
    r"train dp2.*: step 8/8, loss \d+\.\d{4}, [\d.,]+ samples/s, 0:\d\d elapsed",
    r"train dp2.*: evaluating the trained model",
    r"train dp2.*: saving the last checkpoint",
    r"train dp2.*: writing the final weights and the report",
)


@pytest.mark.slow
def test_a_training_and_its_restart_are_told_from_the_first_seconds_to_the_end(tmp_path: Path) -> None:
    saves = {"every": 3, "asynchronous": False}
    fault = {"rank": 1, "step": 5, "fault": "kill"}
    run = {"layout": "dp2", "checkpoint": saves, "max_restarts": 1, "inject": fault, "folder": str(tmp_path / "run")}
    file = slow_job(tmp_path, steps=8, seconds=0.3, run=run)
    timed = timed_lines([*SAMESTEP, "train", str(file), "--progress", f"{EVERY}s"], tmp_path)
    lines = [line for _, line in timed]
    assert timed[0][0] < 30  # seconds, of a busy machine
    assert longest_silence(timed) < EVERY + 3  # likewise
    told = without_still(lines)
    assert in_order(told, "train: checking the task's contract", "train: 2 ranks started", *RANK_0), told
    again = r"train dp2, round 1: loading the checkpoint of step \d"
    assert in_order(told, "train: 2 ranks started again, for round 1", again, *END), told
    of_progress = [line for line in told if line.startswith("train")]
    assert len(set(of_progress)) == len(of_progress)  # one rank writes
    assert "train" not in (tmp_path / "out").read_text(encoding="utf-8").splitlines()[0]
    assert steps_in(tmp_path / "run") == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (*SAMESTEP, "launch", "--num-procs", "2", "--progress", f"{EVERY}s", "--", "-m", "samestep"),
        (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "samestep"),
    ],
    ids=["launch", "torchrun"],
)
def test_ranks_of_a_launcher_have_one_that_writes(tmp_path: Path, launcher: Sequence[str]) -> None:
    file = slow_job(tmp_path, steps=8, seconds=0.05, run={"layout": "dp2", "folder": str(tmp_path / "run")})
    with progress_every(f"{EVERY}s"):
        timed = timed_lines([*launcher, "train", str(file)], tmp_path)
    lines = [line.removeprefix("[localhost 0] ") for _, line in timed]
    told = without_still(lines)
    assert not any(line.startswith("[localhost 1] train") for _, line in timed)
    assert in_order(told, "train: checking the task's contract", *RANK_0), told
    of_progress = [line for line in told if line.startswith(("train", "launch"))]
    assert len(set(of_progress)) == len(of_progress)
    if "launch" in launcher:
        assert told[0] == "launch: 2 ranks started"


def test_ranks_that_print_nothing_still_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "quiet.py"
    script.write_text("import time\ntime.sleep(1.5)\n", encoding="utf-8")
    words = ["launch", "--num-procs", "1", "--logs", str(tmp_path / "logs"), "--progress", "0.5s", "--", str(script)]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "launch: 1 rank started" in printed.err.splitlines()
    assert re.search(r"^launch: still running 1 rank \(1 s\)$", printed.err, re.MULTILINE)


def test_a_proof_tells_its_phases_and_its_json_is_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path)
    words = ["verify", str(file), "--layouts", "dp2, tp2", "--steps", "2", "--json", str(tmp_path / "v.json")]
    with progress_every("30s"):
        assert main(words) == 0
    printed = capfd.readouterr()
    assert {row["layout"] for row in json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))} == {"dp2", "tp2"}
    assert not any(line.startswith("verify: ") for line in printed.out.splitlines())
    assert in_order(
        printed.err.splitlines(),
        "verify: checking the task's contract",
        r"verify: one process: step 1/2, loss [\d.]+, 0:\d\d elapsed",
        "verify: 2 ranks started",
        "verify: ranks: layout 1 of 2, dp2",
        "verify: ranks: layout 2 of 2, tp2",
    ), printed.err


@pytest.mark.slow
def test_the_lines_of_a_command_begin_with_its_name_also_in_the_steps_of_a_proof(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress_every("30s"):
        assert main(["check", str(job_file(tmp_path)), "--layouts", "dp2"]) == 0
    told = capfd.readouterr().err.splitlines()
    assert not [line for line in told if line.startswith("verify")]
    assert in_order(told, r"check: one process: step 1/2, .*", "check: ranks: layout 1 of 1, dp2"), told


def test_data_that_take_long_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "late.py"
    task.write_text(
        f"import sys, time\nsys.path.insert(0, {str(TESTS)!r})\nimport small_tasks\n"
        "class Late(small_tasks.Points):\n"
        "    def train_set(self):\n        time.sleep(0.7)\n        return super().train_set()\n",
        encoding="utf-8",
    )
    file = job_file(tmp_path, task=f"{task}:Late", args=RECIPE["args"], run={"folder": str(tmp_path / "run")})
    assert main(["train", str(file), "--progress", "0.3s"]) == 0
    assert re.search(r"^train.*: still reading the data \(\d s\)$", capfd.readouterr().err, re.MULTILINE)


def test_a_terminal_has_bars_and_no_lines(tmp_path: Path) -> None:
    file = slow_job(tmp_path, steps=8, seconds=0.05, run={"layout": "dp2", "folder": str(tmp_path / "run")})
    outer, inner = pty.openpty()
    words = [*SAMESTEP, "train", str(file), "--progress", "0.1s"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=inner, env={**os.environ, "TERM": "xterm", "COLUMNS": "160"}
        )
    os.close(inner)
    drawn = b""
    while True:
        try:
            drawn += os.read(outer, 4096)
        except OSError:  # the terminal is closed
            break
    os.close(outer)
    assert process.wait(timeout=60) == 0
    text = drawn.decode()
    assert all(part in text for part in ("train dp2", "8/8", "loss ", "samples/s"))
    assert "\x1b[" in text  # drawn again and again
    assert not re.search(r"contract|ranks started|rendezvous|elapsed|still", text), text


# Other streams that are closed or full have slow tests in tests/test_narrow_places.py.
@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["/dev/full", None])
def test_standard_error_that_takes_nothing_ends_no_training(tmp_path: Path, stderr: str | None) -> None:
    file = job_file(tmp_path, run={"folder": str(tmp_path / "run")})
    redirected = "2>&-" if stderr is None else f"2>{stderr}"
    command = f'exec "$@" {redirected}'
    words = ["sh", "-c", command, "sh", *SAMESTEP, "train", str(file), "--progress", "0.1s"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0
    assert "train:" not in done.stdout
    assert steps_in(tmp_path / "run") == RECIPE["steps"]


COMMANDS = {
    "compare": ("compare {job} --methods single,native:dp2 --repeats 1", r"compare: the reference: .*"),
    "tune": ("tune {job} --settings threads --steps 4 --repeats 1", r"tune: threads \(1 of 1, \d+ s\)"),
    "drill": ("drill {job} --faults kill --steps 8", r"drill: undisturbed \(1 of 2, \d+ s\)"),
    "plan": ("plan {job} --devices 2", r"plan: measuring the rates of this machine"),
    "comm": ("comm --processes 2 --sizes 1KiB --seconds 0.05", r"comm: 2 ranks started"),
    "doctor": ("doctor", r"doctor: trying collectives of gloo on 2 ranks"),
    "check": ("check {job}", r"check: checking the task's contract"),
    "dry run": ("train {job} --layout dp2 --dry-run", r"train: 2 ranks started"),
    "bits": ("verify {job} --layout dp2 --bits", r"verify --bits: dp2: step 1/5, loss .*"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_long_command_has_lines(tmp_path: Path, name: str) -> None:
    words, wanted = COMMANDS[name]
    file = job_file(tmp_path, run={"layout": "dp2"})
    timed = timed_lines([*SAMESTEP, *words.format(job=file).split(), "--progress", "1s"], tmp_path)
    lines = [line for _, line in timed]
    assert in_order(lines, wanted), lines
    assert longest_silence(timed) < 5, timed
