"""`samestep launch` over several hosts, all of them this machine: on the loopback, and by a stand-in of SSH."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import (
    SCRIPTS,
    TOLD,
    assert_nothing_is_left,
    await_files,
    free_port,
    hosts_store,
    processes_alive,
    started,
)

import samestep.launch.consistency
import samestep.launch.handshake
from samestep.cli.main import main
from samestep.errors import StartError, UserError
from samestep.launch import remote_agent
from samestep.launch.handshake import Handshake, Seat
from samestep.launch.job_secret import of_user
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchTimeouts
from samestep.launch.starter import agent_command

pytestmark = [
    pytest.mark.usefixtures("folder_of_its_own"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture
def port() -> int:
    return free_port()


def one_of_two(node_rank: int, port: int, *words: str) -> list[str]:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["--no-ssh", "--num-nodes", "2", "--node-rank", str(node_rank), *where, *words]


@pytest.mark.slow
def test_two_hosts_started_one_by_one_are_one_job(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with started(*one_of_two(1, port, "--num-procs", "1", "--", TOLD, "tell")) as other:
        assert main(["launch", *one_of_two(0, port, "--num-procs", "1", "--", TOLD, "tell")]) == 0
        out, _ = other.communicate(timeout=60)
    name = re.escape(socket.gethostname())
    printed = capfd.readouterr()
    assert f"samestep: {socket.gethostname()}: the hosts' store at 127.0.0.1:{port} is not " in printed.err
    assert re.match(rf"\[{name} 0\] RANK=0 WORLD_SIZE=2 .* GROUP_RANK=0 MASTER_ADDR=127.0.0.1", printed.out)
    assert re.match(rf"\[{name} 1\] RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1", out)
    assert other.returncode == 0


@pytest.mark.slow
def test_a_failure_on_one_host_ends_the_other_and_both_tell_it(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with started(*one_of_two(1, port, "--num-procs", "1", "--", TOLD, "raise")) as other:
        assert main(["launch", *one_of_two(0, port, "--num-procs", "1", "--", TOLD, "raise")]) == 1
        _, err = other.communicate(timeout=60)
    for said in (capfd.readouterr().err, err):
        assert said.count("failed first: exit code 1\n") == 1
        assert "samestep: rank 1 on " in said
        assert "ValueError: planted in rank 1" in said
    assert other.returncode == 1


@pytest.mark.slow
def test_hosts_that_differ_do_not_begin(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with started(*one_of_two(1, port, "--num-procs", "2", "--", TOLD, "tell")) as other:
        assert main(["launch", *one_of_two(0, port, "--num-procs", "1", "--", TOLD, "tell")]) == 2
        _, err = other.communicate(timeout=60)
    name = socket.gethostname()
    says = f'differ in their ranks a host: {name} has "1", {name} has "2"'
    assert says in capfd.readouterr().err
    assert says in err
    assert other.returncode == 2


def spec(node_rank: int, port: int, **values: object) -> NodeSpec:
    known = {"job": "one", "fewest": 2, "most": 2, "num_procs": 1, "timeouts": LaunchTimeouts(start_timeout=20.0)}
    where = {"address": "127.0.0.1", "port": port, "serves": node_rank == 0, "node_rank": node_rank}
    return NodeSpec(**{"host": f"host-{'ab'[node_rank]}", "command": ("x",), **known, **where, **values})  # pyright: ignore


@contextmanager
def waiting(first: Handshake) -> Iterator[list[str]]:
    """The first host's agent as it waits for the second; what it was told at last."""
    told: list[str] = []

    def wait() -> None:
        try:
            first.agree()
        except (UserError, StartError) as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    yield told
    thread.join()


def test_versions_that_differ_are_named_with_both_hosts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Handshake(spec(0, port))
    with waiting(first) as told:
        await_seat(first)
        monkeypatch.setattr(samestep.launch.consistency, "VERSION", "9.9")
        with pytest.raises(
            UserError,
            match=r'differ in their samestep version: host-a has ".*", host-b has "9.9"; install the same on both',
        ) as late:
            Handshake(spec(1, port)).agree()
    assert told == [str(late.value)]


def test_hosts_with_other_ranks_do_not_agree(port: int) -> None:
    first = Handshake(spec(0, port))
    with waiting(first) as told:
        await_seat(first)
        with pytest.raises(UserError, match='differ in their ranks a host: host-a has "1", host-b has "2"') as late:
            Handshake(spec(1, port, num_procs=2)).agree()
    assert told == [str(late.value)]


def await_seat(first: Handshake) -> None:
    while first._store.read("samestep/node/0", Seat) is None:
        pass


def test_another_jobs_store_is_no_place_to_meet_and_is_not_disturbed(port: int) -> None:
    first = Handshake(spec(0, port))
    with waiting(first) as told:
        await_seat(first)
        with pytest.raises(UserError, match='is that of job "one", which host-a began; host-b is of job "two"'):
            Handshake(spec(1, port, job="two")).agree()
        with pytest.raises(
            UserError, match=r"node rank 0 of job one is held by host-a .* and host-b comes with it too"
        ):
            Handshake(replace(spec(1, port), node_rank=0)).agree()
        Handshake(spec(1, port)).agree()
    assert told == []


def test_hosts_that_do_not_come_are_named(port: int) -> None:
    with pytest.raises(StartError, match=r"only 1 of 2 hosts came within 1 s: host-a; not host-b$"):
        Handshake(spec(0, port, timeouts=LaunchTimeouts(start_timeout=0.6), hosts=("host-a", "host-b"))).agree()
    says = f"host-b waited 1 s for the job's store at 127.0.0.1:{port}: Connection refused; host-a is to serve it"
    with pytest.raises(StartError, match=says):
        Handshake(spec(1, port, timeouts=LaunchTimeouts(start_timeout=0.6), hosts=("host-a", "host-b")))


def test_a_taken_port_is_named_with_its_holder(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        assert main(["launch", *one_of_two(0, number, "--num-procs", "1", "--", TOLD, "tell")]) == 2
    comm = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert f"is taken by {comm} (process {os.getpid()} of " in capfd.readouterr().err


def test_an_address_of_another_host_is_no_place_for_the_store(port: int) -> None:
    # A documentation address, which no host has.
    with pytest.raises(UserError, match="--master-addr is to be an address of the host with --node-rank 0"):
        Handshake(spec(0, port, address="203.0.113.1"))
    with pytest.raises(UserError, match=r"the name no.such.host.invalid does not resolve"):
        Handshake(spec(1, port, address="no.such.host.invalid", timeouts=LaunchTimeouts(start_timeout=0.6)))


def test_what_listens_may_be_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samestep.launch.handshake, "_ANSWER", 1.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,  # takes connections, and never answers
        pytest.raises(StartError, match=r"is no job's store \(no answer\); use another --master-port"),
    ):
        Handshake(spec(1, listening.getsockname()[1]))


def test_an_agent_that_comes_again_takes_its_old_place() -> None:
    store = hosts_store()
    again = Handshake(spec(1, store.port, serves=False))
    again._store.write("samestep/node/1", Seat(host="host-b", machine="elsewhere", process=1))
    again._take_seat()
    assert again._store.wait("samestep/node/1", Seat).process == os.getpid()


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options with which hosts a and b are reached by the stand-in for OpenSSH."""
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "ssh.log"))
    Path("hosts").write_text("a slots=1\nb slots=2\n", encoding="utf-8")
    return ["--hostfile", "hosts", "--ssh", f"{sys.executable} {SCRIPTS / 'fake_ssh.py'} -F 'my config'"]


@pytest.mark.slow
def test_over_ssh_all_hosts_are_one_job_and_nothing_of_the_users_stands_in_a_command(
    ssh: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAMESTEP_COLOUR", "deep red; $(id)")
    monkeypatch.setenv("WANDB_API_KEY", "w_s3cret")
    assert main(["launch", *ssh, "--pass", "SAMESTEP_COLOUR", "--", TOLD, "tell", "it's $HOME", ";id"]) == 0
    out, err = capfd.readouterr()
    lines = sorted(out.splitlines())
    assert [line.split(" colour")[0].rsplit(" ", 1)[0] for line in lines] == [
        "[a 0] RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0",
        "[b 1] RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=1",
        "[b 2] RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1",
    ]
    assert all(line.endswith("colour=deep red; $(id) [\"it's $HOME\", ';id']") for line in lines)
    assert re.fullmatch(
        r"samestep: not sent to other hosts, since it may be secret: [^\n]*WANDB_API_KEY[^\n]*\n", err
    )
    log = Path("ssh.log").read_text(encoding="utf-8")
    commands = [words for words in map(json.loads, log.splitlines()) if "-G" not in words]
    assert sorted(words[words.index("--") + 1] for words in commands) == ["a", "b"]
    assert all(words[:2] == ["-F", "my config"] and "BatchMode=yes" in words for words in commands)
    assert not any(text in log for text in ("deep red", "s3cret", "told.py", ";id"))


def test_a_host_that_is_not_reached_is_named_and_the_others_end(
    ssh: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text("a slots=1\ngone slots=1\n", encoding="utf-8")
    assert main(["launch", *ssh, "--", TOLD, "wait"]) == 1
    says = (
        "gone can't be reached: ssh: connect to host gone port 22: No route to host (python ended with exit code 255)"
    )
    assert capfd.readouterr().err.splitlines()[-1].endswith(says)


def test_where_a_host_has_no_such_python_the_option_that_names_it_is_told(
    ssh: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *ssh, "--remote-python", "/nowhere/python", "--", TOLD, "tell"]) == 1
    said = capfd.readouterr().err
    assert re.search(r"[ab] can't be reached: .*/nowhere/python: not found \(python ended with exit code 127\)", said)
    assert "; samestep is to be installed there too, and --remote-python names the Python that has it" in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "0.0.9"}, 'samestep version: the starting machine has "0.0.9", a has "'),
        pytest.param(
            {"specs": [{"host": "a", "of_another_samestep": 1}]},
            "samestep sources: a and the starting machine have",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["version", "sources"],
)
def test_another_samestep_at_the_far_end_says_so(changes: Mapping[str, Any], says: str) -> None:
    first, second = remote_agent.request([spec(0, 1, host="a")], ".", {}).splitlines()
    asked = json.dumps({**json.loads(second), **changes}).encode()
    done = subprocess.run(
        agent_command([sys.executable]),
        input=b"\n".join([first, asked, b""]),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    *_, told = [json.loads(line.removeprefix(remote_agent.MARK)) for line in done.stdout.splitlines()]
    assert told["outcome"]["message"].startswith(f"the hosts of this job differ in their {says}")


@pytest.mark.parametrize("where", [[], ["--master-addr", "127.0.0.1"]], ids=["found", "given"])
def test_a_port_for_the_store_that_is_taken_is_named_with_its_holder(
    ssh: list[str], where: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        assert main(["launch", *ssh, *where, "--master-port", str(number), "--", TOLD, "tell"]) == 2
    comm = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    said = f"samestep: --master-port {number} is taken by {comm} (process {os.getpid()} of "
    assert said in capfd.readouterr().err


def test_an_address_of_another_machine_is_no_place_to_start_from(
    ssh: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *ssh, "--master-addr", "203.0.113.1", "--", TOLD, "tell"]) == 2
    says = "samestep: --master-addr 203.0.113.1 is no address of this machine, where the hosts meet: "
    assert says in capfd.readouterr().err


@pytest.mark.slow
def test_over_ssh_the_root_cause_is_told_once(ssh: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *ssh, "--output", "files", "--", TOLD, "raise"]) == 1
    err = capfd.readouterr().err
    assert err.count("samestep: rank 1 on b failed first: exit code 1\nTraceback") == 1
    assert err.count("Traceback") == 1, err
    assert re.search(r"all that it wrote: b:runs/launch-\S+/b/round-0/rank-1.err", err)


def test_what_all_hosts_get_wrong_is_told_once(ssh: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *ssh, "--chdir", "/nowhere", "--", TOLD, "tell"]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "may be secret" not in line]
    assert 1 <= len(said) <= 2  # of the two hosts
    assert all("the folder /nowhere: No such file or directory; use --chdir FOLDER" in line for line in said)


@pytest.mark.slow
def test_ctrl_c_ends_all_hosts(ssh: list[str]) -> None:
    with started(*ssh, "--", TOLD, "wait", "here") as process:
        await_files("here-0", "here-1", "here-2")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.rstrip().endswith("samestep: stopped by signal 2")
    assert "SIGINT: the ranks of all hosts are asked to stop; a second one ends them at once" in err


@pytest.mark.slow
def test_the_secret_goes_to_agents_alone_and_over_standard_input(ssh: list[str]) -> None:
    file, text = Path("secret"), "of-the-user-0123456789"
    file.touch(0o600)
    file.write_text(text, encoding="utf-8")
    secret = of_user(file, None)
    assert secret is not None
    with started(*ssh, "--secret-file", str(file), "--", TOLD, "wait", "here") as process:
        await_files("here-0", "here-1", "here-2")
        shown = [word for each in processes_alive() for word in (*each.cmdline(), *each.environ().values())]
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=30)
    assert sum("samestep.launch.remote_agent" in word for word in shown) >= 2
    written = [each.read_text(encoding="utf-8") for each in (Path("ssh.log"), *Path("runs").rglob("rank-*"))]
    assert not [word for word in (*shown, *told, *written) if text in word or secret.sent() in word]


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_nothing(ssh: list[str]) -> None:
    with started(*ssh, "--", TOLD, "wait", "here") as process:
        await_files("here-0", "here-1", "here-2")
        alive = [each.cmdline() for each in processes_alive()]
        assert sum("samestep.launch.remote_agent" in words[-1] for words in alive if words[0] == sys.executable) == 2
        assert sum("-u" in words for words in alive) == 3  # the ranks
        process.kill()
    assert_nothing_is_left()
