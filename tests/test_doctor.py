"""`samestep doctor`: what works on this machine, held against psutil, and collectives that don't."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from findings import GIB, by_subject, only
from launching import processes_alive

from samestep.cli.main import main
from samestep.comm_bench import try_ranks
from samestep.comm_bench.try_ranks import read_notes
from samestep.doctor import collectives, examine, machine
from samestep.doctor.findings import DoctorFinding, ExaminationRequest, ok

TESTS = Path(__file__).parent


def test_it_tells_what_there_is_and_which_collectives_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    code = main(["doctor", "--folder", str(tmp_path / "runs"), "--json", str(file), "--force"])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert code == (1 if any(each["verdict"] == "problem" for each in found) else 0)
    of = by_subject(found)
    assert of["PyTorch"]["values"]["torch"] == torch.__version__
    assert of["cores"]["values"]["usable"] == len(psutil.Process().cpu_affinity() or [])
    assert of["memory"]["values"]["total_bytes"] == psutil.virtual_memory().total
    assert of["runs' folder"]["values"]["total_bytes"] == psutil.disk_usage(str(tmp_path)).total
    assert of["open files"]["values"]["soft"] == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]
    assert of["backend gloo"]["verdict"] == "ok", of["backend gloo"]
    four = dict.fromkeys(("float32", "bfloat16", "float64", "int64"), True)
    wanted = dict.fromkeys(collectives.COLLECTIVES, four) | {"barrier": {"float32": True}}
    assert len(wanted) == 10
    assert of["backend gloo"]["values"]["collectives"] == wanted
    output = capsys.readouterr().out
    assert "backend gloo, tried on 2 ranks" in output
    assert "FAILS" not in output
    for finding in found:
        assert finding["verdict"] == "ok" or finding["remedy"]
    assert not (tmp_path / "runs").exists()


def test_a_collective_with_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none_of_it(tensor: torch.Tensor, **_: Any) -> None:
        tensor.zero_()

    monkeypatch.setattr(dist, "all_reduce", none_of_it)
    collectives.try_all(str(tmp_path), "cpu")
    ended = [line for line in read_notes(collectives.notes_of(tmp_path, 0)) if "works" in line]
    assert {line["collective"] for line in ended} == collectives.ALONE
    failed = {(line["collective"], line["dtype"]): line["reason"] for line in ended if not line["works"]}
    assert failed == {
        ("all-reduce", dtype): "a wrong result: element 1 is 0, and 1 is right"
        for dtype in ("float32", "bfloat16", "float64", "int64")
    }


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(try_ranks, "_MODULE", "fake_trials")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    return monkeypatch


CPU = collectives.CollectiveTrial(backend="gloo", device="cpu", ranks=2)


@pytest.mark.slow
def test_a_collective_that_hangs_is_named_at_the_time_limit(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "hangs")
    found = only(collectives.collectives(CPU, limit=6))
    assert processes_alive() == []  # ranks that hang for ten minutes are stopped, and not waited for
    assert found.verdict == "problem"
    assert found.text == (
        "stopped after 6 s: rank 0 was through with reduce of float32; rank 1 stayed in reduce of float32"
    )


def test_a_collective_that_fails_on_one_rank_is_named(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "fails")
    found = only(collectives.collectives(CPU, limit=60))
    assert found.verdict == "warning"
    assert "1 of 2 attempts fail on 2 ranks: broadcast of bfloat16" in found.text
    assert found.values["collectives"] == {"broadcast": {"bfloat16": False}, "reduce": {"float32": True}}


def test_ranks_that_cannot_start_are_a_problem(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "raises")
    found = only(collectives.collectives(CPU, limit=60))
    assert found.verdict == "problem"
    assert "RuntimeError: planted" in found.text


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "trials", list)


@pytest.mark.usefixtures("no_ranks")
def test_a_check_that_hangs_or_raises_is_named_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs(asked: ExaminationRequest) -> Iterator[DoctorFinding]:
        yield ok("before", "this was found")
        over.wait()

    def raises(asked: ExaminationRequest) -> Iterator[DoctorFinding]:
        raise ValueError("planted")

    def works(asked: ExaminationRequest) -> Iterator[DoctorFinding]:
        yield ok("works", "well")

    monkeypatch.setattr(examine, "CHECKS", {"hangs": hangs, "raises": raises, "works": works})
    found = list(examine.examine(ExaminationRequest(), limit=2.0))
    over.set()  # not before: the check that hangs is not waited for
    assert [(each.subject, each.verdict) for each in found] == [
        ("before", "ok"),
        ("hangs", "problem"),
        ("raises", "warning"),
        ("works", "ok"),
    ]
    assert "ValueError: planted" in found[2].text


@pytest.mark.usefixtures("no_ranks")
def test_a_problem_is_exit_code_1_and_a_warning_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB, available=GIB // 2))
    monkeypatch.setattr(examine, "CHECKS", {"memory": machine.memory})
    assert main(["doctor"]) == 0
    assert "warning: 1, problem: 0" in capsys.readouterr().out
    monkeypatch.setattr(examine, "CHECKS", {"disks": machine.disks})
    (tmp_path / "file").touch()
    assert main(["doctor", "--folder", str(tmp_path / "file" / "runs")]) == 1
    assert "problem: 1" in capsys.readouterr().out


# What a user can give wrong, and what is said of it.
WRONG = {
    "--hosts=": '"" is no host',
    "--hosts=a,,b": '"" is no host',
    "--hosts=a b": '"a b" is no host',
    "--hosts=-oProxyCommand=x": '"-oProxyCommand=x" is no host',
    "--hosts=a;reboot": '"a;reboot" is no host',
    "--hosts=a:0": "a port is a number from 1 to 65535",
    "--hosts=a:65536": "a port is a number from 1 to 65535",
    "--hostfile=nowhere": "--hostfile nowhere: no such file",
    "--hostfile=.": "--hostfile . is a folder; a file is wanted",
    "--hostfile=empty": "it names no host with a slot; use a line such as worker-1 slots=4",
    "--hostfile=binary": "save it as UTF-8",
    "--hostfile=bad": 'bad, line 3: "-worker" is no host',
    "--hostfile=port": '"worker-1:2222" means 2222 slots',
    "--hosts=a --hostfile=bad": "--hosts and --hostfile both name hosts",
    "--port=0": '--port: "0" is out of range; use a whole number from 1 to 65,535',
    "--port=70000": "is out of range; use a whole number from 1 to 65,535",
    "--port=web": '"web" is no whole number',
    "--time-limit=0": '--time-limit: "0" is no time; use seconds above 0',
    "--time-limit=inf": '--time-limit: "inf" is no time',
    "--json=nowhere/x.json": "there is no folder nowhere",
    "nowhere": "nowhere: there is no such folder",
    "bad": "bad is a file; use the run's folder",
    ".": ". holds no run: none of metrics.jsonl",
    ". --port=80": "--port is for the machine, and a run's folder is read alone",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_in_one_message(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("# nothing\n\n", encoding="utf-8")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("bad").write_text("worker-1 slots=4\n# a comment\n-worker slots=4\n", encoding="utf-8")
    Path("port").write_text("worker-1:2222\n", encoding="utf-8")
    # Spaces part arguments, but not inside of one.
    given = [words] if words == "--hosts=a b" else words.split(" ")
    assert main(["doctor", *given]) == 2
    errors = capsys.readouterr().err
    assert WRONG[words] in errors
    assert errors.count("\n") == 1


def test_it_is_not_for_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "samestep: the doctor starts its own processes; start it without a launcher\n"


@pytest.mark.slow
def test_a_signal_ends_it_and_leaves_nothing_running() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not (ranks := _marked(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert gone
    assert alive == []


def _marked(pid: int) -> list[psutil.Process]:
    """The processes of the doctor's trial."""
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "samestep.comm_bench.try_ranks" in " ".join(child.cmdline())
    ]
