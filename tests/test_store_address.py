"""Where a job's store is: names that resolve late, never, or to the loopback of the host that has them."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from launching import hosts_store

from samestep.cli.main import main
from samestep.errors import UserError
from samestep.launch import store_address
from samestep.launch.handshake import Handshake
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchTimeouts


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names and their addresses, as this host's resolver has them; all addresses have themselves."""
    known: dict[str, str] = {}
    ask: Callable[..., Any] = socket.getaddrinfo

    def answer(host: str, *rest: Any, **options: Any) -> Any:
        if host.startswith("worker-") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(known.get(host, host), *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return known


def spec(**values: Any) -> NodeSpec:
    known = {"job": "one", "host": "worker-1", "most": 2, "fewest": 2, "num_procs": 1, "command": ("x",)}
    timeouts = LaunchTimeouts(start_timeout=5.0)
    return NodeSpec(**{**known, "address": "worker-1", "timeouts": timeouts, "serves": True, **values})


def test_a_name_that_leads_to_the_loopback_on_itself_is_no_place(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["worker-1"] = "127.0.1.1"
    resolver, asked = Mock(wraps=socket.getaddrinfo), Mock()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    for module, name in ((time, "sleep"), (socket, "create_connection"), (store_address, "store_at")):
        monkeypatch.setattr(module, name, getattr(asked, name))
    with pytest.raises(UserError) as error:
        Handshake(spec())
    # Told at once: the name is looked up a single time, nothing is waited for, served or connected to.
    assert [call.args[0] for call in resolver.call_args_list] == ["worker-1"]
    assert asked.mock_calls == []
    assert str(error.value) == (
        "worker-1 leads to 127.0.1.1 on worker-1 itself, where no other host reaches it; use "
        "its address instead of the name, as --master-addr on all hosts"
    )


def test_where_other_hosts_are_known_the_way_towards_them_says_the_address(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    towards = {"worker-2": "127.0.0.1", "worker-3": "10.9.0.1"}
    monkeypatch.setattr(store_address, "address_towards", towards.__getitem__)
    three = spec(hosts=("worker-1", "worker-2", "worker-3"), most=3, fewest=3)
    assert store_address.to_serve_at(three, "127.0.1.1") == "10.9.0.1"
    with pytest.raises(UserError, match=r"worker-1 leads to 127\.0\.1\.1 on worker-1 itself"):
        store_address.to_serve_at(spec(hosts=("worker-1", "worker-2")), "127.0.1.1")


def test_the_host_that_serves_uses_that_address_itself(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["worker-1"] = "127.0.1.1"
    # Another address than the name's, and one that every machine has.
    monkeypatch.setattr(store_address, "address_towards", lambda host: "127.0.0.2")
    monkeypatch.setattr(store_address, "is_loopback", lambda address: address == "127.0.1.1")
    with socket.create_server(("127.0.0.2", 0)) as listening:
        port = listening.getsockname()[1]
    handshake = Handshake(spec(hosts=("worker-1", "worker-2"), port=port))
    assert handshake.address == "127.0.0.2"
    assert handshake.ended() is None


def test_of_a_store_that_is_gone_no_failures_are_known() -> None:
    store = hosts_store()
    handshake = Handshake(spec(serves=False, address="127.0.0.1", port=store.port))
    assert handshake.failures() == []
    del store
    assert handshake.failures() is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_a_loopback_that_was_asked_for_is_served(address: str) -> None:
    assert store_address.to_serve_at(spec(address=address), "127.0.0.1") == "127.0.0.1"


def test_the_machine_that_starts_a_job_serves_where_the_hosts_reach_it(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["worker-1"] = "127.0.1.1"
    towards = {"worker-2": "127.0.0.1", "worker-3": "10.9.0.1"}
    monkeypatch.setattr(store_address, "address_towards", towards.__getitem__)
    assert store_address.to_meet_at("worker-1", ["worker-2", "worker-3"]) == "10.9.0.1"
    assert store_address.to_meet_at("worker-1", ["worker-2"]) == "worker-1"  # all hosts are this machine
    for address in ("127.0.1.1", "localhost", "10.9.0.1"):  # it is meant
        assert store_address.to_meet_at(address, ["worker-3"]) == address
    names["worker-1"] = "10.9.0.7"
    assert store_address.to_meet_at("worker-1", ["worker-3"]) == "worker-1"


def test_a_name_on_the_loopback_is_no_place_where_the_way_to_the_hosts_is_not_known(
    names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names["worker-1"] = "127.0.1.1"
    (tmp_path / "hosts").write_text("worker-2 slots=1\nworker-3 slots=1\n", encoding="utf-8")
    words = ["--hostfile", str(tmp_path / "hosts"), "--master-addr", "worker-1", "--ssh", "false"]
    assert main(["launch", *words, "--", "true"]) == 2
    assert capfd.readouterr().err == (
        "samestep: --master-addr worker-1 leads to 127.0.1.1 on this machine, where no other host reaches it; use "
        "its address instead of the name\n"
    )


def test_a_name_may_come_late(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            names["worker-1"] = "10.9.0.1"

    monkeypatch.setattr(time, "sleep", wait)
    assert store_address.resolved(spec(host="worker-2"), time.monotonic() + 60) == "10.9.0.1"
    says = "samestep: worker-2: the name worker-1 does not resolve yet (Name or service not known); waiting for it\n"
    assert capfd.readouterr().err == says


@pytest.mark.parametrize("serves", [True, False])
def test_a_name_that_never_comes_is_told(serves: bool, names: dict[str, str]) -> None:
    says = r"worker-2: the name worker-1 does not resolve \(Name or service not known\), nor has it for 1 s; "
    with pytest.raises(UserError, match=says):
        Handshake(spec(host="worker-2", serves=serves, timeouts=LaunchTimeouts(start_timeout=1.0)))
