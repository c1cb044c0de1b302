"""Hosts in a hostfile, as each launcher writes them, and which of them this machine is."""

import socket
from pathlib import Path

import pytest
from places import at, read, refused, slots

from samestep.launch.environments.base import which
from samestep.launch.environments.hostfile import read_hostfile

pytestmark = pytest.mark.quick


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-1 slots=4\nworker-2 slots=4\n", {"worker-1": 4, "worker-2": 4}),  # DeepSpeed, Horovod
        ("worker-1 slots=2 max_slots=4\nworker-2 slots=1 max-slots=1", {"worker-1": 2, "worker-2": 1}),  # Open MPI
        ("worker-1:4\n10.0.0.7:2\n[fd00::7]:3", {"worker-1": 4, "10.0.0.7": 2, "fd00::7": 3}),  # MPICH, horovodrun -H
        ("[fd00::7] slots=2\n[fe80::1%eth0]:3", {"fd00::7": 2, "fe80::1%eth0": 3}),  # as the message says
        ("node-1\nnode-1\nnode-2", {"node-1": 2, "node-2": 1}),  # a node a line, as PBS and old Open MPI write it
        ("node-1 slots=2\nnode-2 slots=1\nnode-1 slots=3", {"node-1": 5, "node-2": 1}),
        ("Node-1 slots=2\nnode-1. slots=1\n[FD00:0::7]\n[fd00::7]:3", {"Node-1": 3, "FD00:0::7": 4}),  # spellings
        ("# head\n\n  worker-1\tslots=4  # fast\r\n#worker-2 slots=4\n", {"worker-1": 4}),
        ("worker-1 slots=0\nworker-2 slots=1", {"worker-2": 1}),
        ("worker-1.rack.example slots=8", {"worker-1.rack.example": 8}),
    ],
)
def test_a_hostfile_is_read(hostfile: Path, text: str, expected: dict[str, int]) -> None:
    hostfile.write_text(text, encoding="utf-8")
    found = at({}, hostfile=hostfile)
    assert slots(found) == expected
    assert found.cluster.place == "hostfile"
    assert not found.on_every_host


def test_the_lines_of_a_hostfile_are_shown(hostfile: Path) -> None:
    hostfile.write_text("# head\nworker-1 slots=4 # x\n", encoding="utf-8")
    assert read(at({}, hostfile=hostfile)) == {f"{hostfile}:2": "worker-1 slots=4"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it names no host with a slot; use a line such as worker-1 slots=4"),
        ("# nobody\n", "it names no host with a slot"),
        ("worker-1 slots=0", "it names no host with a slot"),
        ("\nworker-1 slots=four", 'line 2: "slots=four": slots are a whole number'),
        ("worker-1 slots=-1", 'line 1: "slots=-1": slots are a whole number'),
        ("worker-1 slots", 'line 1: "slots" is not known'),
        ("worker-1 slot=4", 'line 1: "slot=4" is not known; use a line such as worker-1 slots=4'),
        ("worker-1 slots=4 slots=2", '"slots=2" says the slots of worker-1 a second time'),
        ("worker-1:4 slots=2", '"slots=2" says the slots of worker-1:4 a second time'),
        ("worker-1 slots=4 max_slots=2", "slots=4 is more than max_slots=2"),
        ("worker-1:2222", "a host has 1024 at most; if it is a port, say it in OpenSSH's configuration"),
        ("-oProxyCommand=x slots=2", '"-oProxyCommand=x" is no host'),
        ("user@worker-1 slots=2", "\"user@worker-1\" is no host: a user's name is no part of it; OpenSSH's"),
        ("worker-1,worker-2", '"worker-1,worker-2" names several hosts; write each into a line of its own'),
        ("worker-1, slots=2", '"worker-1," is no host'),
        ("fd00::7 slots=2", '"fd00::7" is no host; write an IPv6 address in brackets: [fd00::7]'),
        ("fe80::1%eth0", '"fe80::1%eth0" is no host; write an IPv6 address in brackets: [fe80::1%eth0]'),
        ("[fd00:x] slots=2", '"[fd00:x]" is no host; use a line such as'),
        ("[fd00:7] slots=2", '"fd00:7" is no host'),
    ],
)
def test_a_wrong_hostfile(hostfile: Path, text: str, message: str) -> None:
    hostfile.write_text(text, encoding="utf-8")
    said = refused({}, hostfile=hostfile)
    assert f"--hostfile {hostfile}" in said
    assert message in said


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    assert "no such file" in refused({}, hostfile=tmp_path / "none")
    assert "is a folder" in refused({}, hostfile=tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    assert "save it as UTF-8" in refused({}, hostfile=tmp_path / "picture")


def test_a_hostfile_is_read_without_looking_for_this_machine(hostfile: Path) -> None:
    hostfile.write_text("worker-1 slots=2\nworker-2\n", encoding="utf-8")
    hosts, _ = read_hostfile(hostfile)
    assert [(host.name, host.slots) for host in hosts] == [("worker-1", 2), ("worker-2", 1)]


@pytest.mark.parametrize(
    ("names", "own", "this"),
    [
        (["worker-1", "worker-2"], "worker-2", 1),
        (["worker-1.rack.example", "worker-2.rack.example"], "worker-2", 1),
        (["worker-1", "worker-2"], "worker-2.rack.example", 1),
        (["worker-1", "localhost"], "elsewhere", 1),
        (["203.0.113.1", "127.0.0.1"], "elsewhere", 1),
        (["203.0.113.1", "203.0.113.2"], "elsewhere", None),
        (["no-such-host.invalid"], "elsewhere", None),
        (["node.a.example", "node.b.example"], "node.b.example", 1),
    ],
)
def test_which_host_this_is(names: list[str], own: str, this: int | None) -> None:
    assert which(names, own) == this


def test_no_name_server_is_asked_which_host_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    assert which(["ib-1", "ib-2", "127.0.0.2"], "elsewhere") == 2  # all of 127.0.0.0/8 is this machine
    assert which(["ib-1", "ib-2"], "elsewhere") is None
