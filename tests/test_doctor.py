"""`samestep doctor`: what works on this machine, held against psutil, and planted faults of machines."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from samestep.cli.main import main
from samestep.cluster.world import join
from samestep.doctor import (
    collectives,
    cores,
    disk,
    examine,
    host_list,
    hosts,
    limits,
    memory,
    packages,
    ports,
    trial,
)
from samestep.doctor.finding import Asked, Finding, ok
from samestep.doctor.host_list import Host

TESTS = Path(__file__).parent
GIB = 2**30
Usage = namedtuple("Usage", ["total", "used", "free"])


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def by_subject(findings: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in findings}


def test_it_tells_what_there_is_and_which_collectives_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    code = main(["doctor", "--folder", str(tmp_path / "runs"), "--json", str(file)])
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
    with join(alone=True, device="cpu") as world:
        assert not collectives.COLLECTIVES["all-reduce"](world, torch.float32)
        assert collectives.COLLECTIVES["broadcast"](world, torch.float32)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(trial, "_MODULE", "fake_trials")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    return monkeypatch


CPU = trial.Trial(backend="gloo", device="cpu", ranks=2)


def test_a_collective_that_hangs_is_named_at_the_time_limit(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "hangs")
    began = time.monotonic()
    found = only(trial.collectives(CPU, limit=6))
    assert time.monotonic() - began < 20
    assert found.verdict == "problem"
    assert found.text == (
        "stopped after 6 s: rank 0 was through with reduce of float32; rank 1 stayed in reduce of float32"
    )


def test_a_collective_that_fails_on_one_rank_is_named(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "fails")
    found = only(trial.collectives(CPU, limit=60))
    assert found.verdict == "warning"
    assert "1 of 2 attempts fail on 2 ranks: broadcast of bfloat16" in found.text
    assert found.values["collectives"] == {"broadcast": {"bfloat16": False}, "reduce": {"float32": True}}


def test_ranks_that_cannot_start_are_a_problem(faked: pytest.MonkeyPatch) -> None:
    faked.setenv("SAMESTEP_TEST_WAY", "raises")
    found = only(trial.collectives(CPU, limit=60))
    assert found.verdict == "problem"
    assert "RuntimeError: planted" in found.text


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "trials", list)


@pytest.mark.usefixtures("no_ranks")
def test_a_check_that_hangs_or_raises_is_named_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs(asked: Asked) -> Iterator[Finding]:
        yield ok("before", "this was found")
        over.wait()

    def raises(asked: Asked) -> Iterator[Finding]:
        raise ValueError("planted")

    def works(asked: Asked) -> Iterator[Finding]:
        yield ok("works", "well")

    began = time.monotonic()
    monkeypatch.setattr(examine, "CHECKS", {"hangs": hangs, "raises": raises, "works": works})
    found = list(examine.examine(Asked(), limit=0.5))
    over.set()
    assert time.monotonic() - began < 5
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
    monkeypatch.setattr(memory, "meminfo", lambda: {"MemTotal": 8 * GIB, "MemFree": GIB // 2})
    monkeypatch.setattr(examine, "CHECKS", {"memory": memory.memory})
    assert main(["doctor"]) == 0
    assert "warning: 1, problem: 0" in capsys.readouterr().out
    monkeypatch.setattr(examine, "CHECKS", {"disks": disk.disks})
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
    "--hostfile=nowhere": "--hostfile nowhere: No such file or directory",
    "--hostfile=.": "--hostfile .: Is a directory",
    "--hostfile=empty": "it names no host; a line such as worker-1 slots=4 would do",
    "--hostfile=binary": "--hostfile binary: it is no text",
    "--hostfile=bad": 'bad, line 3: "-worker" is no host',
    "--hosts=a --hostfile=bad": "--hosts and --hostfile both name hosts",
    "--port=0": "--port is 0; it should be from 1 to 65535",
    "--port=70000": "--port is 70000",
    "--port=web": "invalid int value",
    "--time-limit=0": "--time-limit is 0; it should be more than 0 seconds",
    "--time-limit=inf": "--time-limit is inf",
    "--json=nowhere/x.json": "there is no folder nowhere",
    "nowhere": "nowhere: there is no such folder",
    "bad": "bad is a file; the run's folder",
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


def test_hosts_are_read_from_a_list_and_from_a_file(tmp_path: Path) -> None:
    hosts_of_a_list = host_list.parse_hosts("worker-1, 10.0.0.7:2222,[fd00::7],[fd00::8]:23")
    assert [(host.name, host.port) for host in hosts_of_a_list] == [
        ("worker-1", 22),
        ("10.0.0.7", 2222),
        ("fd00::7", 22),
        ("fd00::8", 23),
    ]
    assert list(map(str, hosts_of_a_list)) == ["worker-1", "10.0.0.7:2222", "[fd00::7]", "[fd00::8]:23"]
    file = tmp_path / "hosts"
    file.write_text("# two hosts\nworker-1 slots=4\n\nworker-2:2222   slots=2 # the other\n", encoding="utf-8")
    assert list(map(str, host_list.read_hostfile(file))) == ["worker-1", "worker-2:2222"]


def test_a_port_is_free_or_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        found = only(ports.port(Asked(port=number)))
        assert found.verdict == "problem"
        name = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        user = pwd.getpwuid(os.getuid()).pw_name
        assert found.values["held_by"] == [{"pid": os.getpid(), "name": name, "user": user}]
        assert f"{name} (process {os.getpid()} of {user})" in found.text
    assert only(ports.port(Asked(port=number))).verdict == "ok"


def test_the_loopback_works_and_is_a_problem_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(ports.loopback(Asked())).verdict == "ok"
    monkeypatch.setattr(ports, "LOOPBACK", "203.0.113.1")  # a documentation address, which no host has
    assert only(ports.loopback(Asked())).verdict == "problem"


def test_a_host_is_reached_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "exit 255")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        reached, _ = hosts.reached(Host(name="127.0.0.1", port=number))
    assert reached.verdict == "ok"
    assert 0 < reached.values["round_trip_seconds"] < 1
    closed = only(hosts.reached(Host(name="127.0.0.1", port=number)))
    assert closed.verdict == "problem"
    assert "Connection refused" in closed.text
    unknown = only(hosts.reached(Host(name="no-such-host.invalid")))
    assert unknown.verdict == "problem"
    assert "does not resolve" in unknown.text


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{script}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("apart", "verdict"), [(0, "ok"), (100, "warning"), (-100, "warning")])
def test_the_clocks_of_hosts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int, verdict: str
) -> None:
    fake_ssh(tmp_path, monkeypatch, f'date -d "{apart:+d} seconds" +%s.%N')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        _, clock = hosts.reached(Host(name="127.0.0.1", port=number))
    assert clock.verdict == verdict
    assert clock.values["seconds_apart"] == pytest.approx(apart, abs=1)
    arguments = (tmp_path / "arguments").read_text(encoding="utf-8")
    assert f"-p {number} -- 127.0.0.1 date +%s.%N" in arguments
    assert "BatchMode=yes" in arguments


def test_a_clock_behind_a_password_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "exit 255")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, clock = hosts.reached(Host(name="127.0.0.1", port=listening.getsockname()[1]))
    assert clock.verdict == "ok"
    assert "not compared" in clock.text


@pytest.mark.parametrize(
    ("addresses", "alone", "with_others"),
    [
        (["203.0.113.9"], "warning", "problem"),  # of another host
        (["127.0.1.1"], "ok", "problem"),  # as Debian writes it
        ([], "ok", "problem"),
    ],
)
def test_the_own_name_leads_to_this_host(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], alone: str, with_others: str
) -> None:
    monkeypatch.setattr(hosts, "_addresses", lambda name: addresses)
    assert only(hosts.own_name(Asked())).verdict == alone
    assert only(hosts.own_name(Asked(hosts=(Host(name="b"),)))).verdict == with_others


def test_a_chosen_interface_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-0")
    found = only(hosts.own_name(Asked()))
    assert found.verdict == "problem"
    assert "no-such-0" in found.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    assert only(hosts.own_name(Asked(hosts=(Host(name="b"),)))).verdict == "ok"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "?\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_cgroup_is_read(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert cores.cpu_quota(tmp_path) == quota


def test_a_quota_below_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda groups: 0.5)
    found = only(cores.cores(Asked()))
    assert found.verdict == "warning"
    assert "--threads 1" in (found.remedy or "")


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert only(cores.threads(Asked())).verdict == "warning"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert only(cores.threads(Asked())).verdict == "ok"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert only(cores.threads(Asked())).verdict == "ok"


@pytest.mark.parametrize(
    ("total", "free", "verdict"),
    [(64 * 2**20, 64 * 2**20, "warning"), (8 * GIB, 2**20, "problem"), (8 * GIB, GIB // 2, "warning"),
     (8 * GIB, 8 * GIB, "ok")],
)  # fmt: skip
def test_little_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, total: int, free: int, verdict: str) -> None:
    monkeypatch.setattr(memory, "SHARED", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(total, total - free, free))
    found = only(memory.shared_memory(Asked()))
    assert found.verdict == verdict
    assert verdict == "ok" or "--shm-size" in (found.remedy or "")


def test_swapped_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "meminfo", lambda: {"SwapTotal": 4 * GIB, "SwapFree": GIB})
    found = only(memory.swap(Asked()))
    assert found.verdict == "warning"
    assert found.values["used_bytes"] == 3 * GIB


@pytest.mark.parametrize(("soft", "verdict"), [(100, "problem"), (1024, "warning"), (65536, "ok"), (-1, "ok")])
def test_a_low_limit_of_open_files_is_found(monkeypatch: pytest.MonkeyPatch, soft: int, verdict: str) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (soft, 65536))
    assert only(limits.open_files(Asked())).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(2**20, "problem"), (GIB, "warning"), (100 * GIB, "ok")])
def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, verdict: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(100 * GIB, 0, free))
    runs, temporary = disk.disks(Asked(folder=tmp_path / "not" / "yet"))
    assert (runs.verdict, temporary.verdict) == (verdict, verdict)


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runs, _ = disk.disks(Asked(folder=tmp_path / "file" / "runs"))
    assert runs.verdict == "problem"
    assert f"{tmp_path / 'file'} is a file" in runs.text
    if Path("/proc/sys").is_dir():  # where nobody can make a file, root neither
        runs, _ = disk.disks(Asked(folder=Path("/proc/sys/runs")))
        assert runs.verdict == "problem"


def test_missing_and_old_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "torch>=999",
        "no-such-package>=1",
        'no-such-engine>=1; extra == "wished"',
        'torch>=998; extra == "old"',
        'torch; extra == "there"',
        'no-such-tool; extra == "dev"',
    ]
    monkeypatch.setattr(packages, "requires", lambda name: wanted)
    found = list(packages.packages(Asked()))
    assert [(each.subject, each.verdict) for each in found] == [
        ("packages", "problem"),
        ("extra old", "warning"),
        ("extra there", "ok"),
        ("extra wished", "ok"),
    ]
    assert f"torch is {torch.__version__}, and >=999 is wanted; no-such-package is not installed" in found[0].text
    assert found[3].remedy == 'to have it: pip install --upgrade "samestep[wished]"'


def test_an_engine_without_its_package_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    of = {each.subject: each for each in packages.engines(Asked())}
    assert of["engine native"].text == "can be used"
    assert of["engine deepspeed"].text == "deepspeed not installed"
    assert "pip install 'samestep[deepspeed]'" in (of["engine deepspeed"].remedy or "")


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
        if "samestep.doctor.try_ranks" in " ".join(child.cmdline())
    ]
