"""`samestep doctor`: planted faults of hosts, ports, names and clocks."""

import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from findings import only

from samestep.cli.main import main
from samestep.doctor import examine, findings, network
from samestep.doctor.findings import DoctorFinding, ExaminationRequest, HostAddress, ok
from samestep.launch.environments.hostfile import read_hostfile


def test_hosts_are_read_from_a_list() -> None:
    hosts_of_a_list = findings.parse_hosts("worker-1, 10.0.0.7:2222,[fd00::7],[fd00::8]:23")
    assert [(host.name, host.port) for host in hosts_of_a_list] == [
        ("worker-1", 22),
        ("10.0.0.7", 2222),
        ("fd00::7", 22),
        ("fd00::8", 23),
    ]
    assert list(map(str, hosts_of_a_list)) == ["worker-1", "10.0.0.7:2222", "[fd00::7]", "[fd00::8]:23"]


def test_a_hostfile_is_the_launchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[ExaminationRequest] = []

    def hosts(asked: ExaminationRequest, *, limit: float) -> Iterator[DoctorFinding]:
        examined.append(asked)
        yield ok("hosts", f"within {limit:g} s")

    monkeypatch.setattr(examine, "examine", hosts)
    file = tmp_path / "hosts"
    lines = "# three hosts\nworker-1 slots=4\n\nlocalhost:2  # slots, no port\n[fd00::7]:8\nworker-1\nidle:0\n"
    file.write_text(lines, encoding="utf-8")
    assert main(["doctor", "--hostfile", str(file)]) == 0
    assert [(host.name, host.port) for host in examined[0].hosts] == [
        ("worker-1", 22),
        ("localhost", 22),
        ("fd00::7", 22),
    ]
    launched, _ = read_hostfile(file)
    assert [(host.name, host.slots) for host in launched] == [("worker-1", 5), ("localhost", 2), ("fd00::7", 8)]


def test_a_port_is_free_or_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        found = only(network.port(ExaminationRequest(port=number)))
        assert found.verdict == "problem"
        name = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        user = pwd.getpwuid(os.getuid()).pw_name
        assert found.values["held_by"] == [{"pid": os.getpid(), "name": name, "user": user}]
        assert f"{name} (process {os.getpid()} of {user})" in found.text
    assert only(network.port(ExaminationRequest(port=number))).verdict == "ok"


def test_the_loopback_works_and_is_a_problem_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(network.loopback(ExaminationRequest())).verdict == "ok"
    monkeypatch.setattr(network, "LOOPBACK", "203.0.113.1")  # a documentation address, which no host has
    assert only(network.loopback(ExaminationRequest())).verdict == "problem"


def test_a_host_is_reached_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "exit 255")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        reached, _ = network.reached(HostAddress(name="127.0.0.1", port=number))
    assert reached.verdict == "ok"
    assert 0 < reached.values["round_trip_seconds"] < 1
    closed = only(network.reached(HostAddress(name="127.0.0.1", port=number)))
    assert closed.verdict == "problem"
    assert "Connection refused" in closed.text
    unknown = only(network.reached(HostAddress(name="no-such-host.invalid")))
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
        _, clock = network.reached(HostAddress(name="127.0.0.1", port=number))
    assert clock.verdict == verdict
    assert clock.values["seconds_apart"] == pytest.approx(apart, abs=1)
    arguments = (tmp_path / "arguments").read_text(encoding="utf-8")
    assert f"-p {number} -- 127.0.0.1 date +%s.%N" in arguments
    assert "BatchMode=yes" in arguments


def test_a_clock_behind_a_password_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "exit 255")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, clock = network.reached(HostAddress(name="127.0.0.1", port=listening.getsockname()[1]))
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
    monkeypatch.setattr(network, "_addresses", lambda name: addresses)
    assert only(network.own_name(ExaminationRequest())).verdict == alone
    assert only(network.own_name(ExaminationRequest(hosts=(HostAddress(name="b"),)))).verdict == with_others


def test_a_chosen_interface_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-0")
    found = only(network.own_name(ExaminationRequest()))
    assert found.verdict == "problem"
    assert "no-such-0" in found.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    assert only(network.own_name(ExaminationRequest(hosts=(HostAddress(name="b"),)))).verdict == "ok"
