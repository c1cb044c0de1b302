"""The interface that is named for messages between hosts, where a host's own name would lead them nowhere."""

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from samestep.errors import UserError
from samestep.launch import network
from samestep.launch.network import for_messages, own_name_leads_nowhere
from samestep.launch.script_env import registry
from samestep.ranks import Ranks

pytestmark = pytest.mark.quick

ONE_OF_TWO_HOSTS = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1)
MET = {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "1"}


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let this host's name lead to addresses; to none: it isn't known."""

    def found(host: str, *others: Any, **more: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other host be reached from 10.9.0.2, which an interface eth7 has."""
    monkeypatch.setattr(network, "address_towards", lambda host: "10.9.0.2")
    monkeypatch.setattr(network, "interface_of", lambda address: {"10.9.0.2": "eth7"}[address])


@pytest.mark.parametrize(
    ("addresses", "nowhere"),
    [(["127.0.1.1"], True), (["::1", "127.0.0.1"], True), ([], True), (["127.0.1.1", "10.9.0.2"], False)],
)
def test_a_name_that_leads_to_the_loopback_leads_nowhere(
    addresses: list[str], nowhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, *addresses)
    assert own_name_leads_nowhere() == nowhere


@pytest.mark.parametrize(
    ("ranks", "environ", "addresses", "wanted"),
    [
        (ONE_OF_TWO_HOSTS, MET, ["127.0.1.1"], "eth7"),
        (ONE_OF_TWO_HOSTS, MET, ["10.9.0.2"], None),  # gloo finds it by itself
        (ONE_OF_TWO_HOSTS, MET | {"SM_NETWORK_INTERFACE_NAME": "eth0"}, ["10.9.0.2"], "eth0"),
        (ONE_OF_TWO_HOSTS, MET | {"SM_RESOURCE_CONFIG": '{"network_interface_name": "eth0"}'}, ["10.9.0.2"], "eth0"),
        (ONE_OF_TWO_HOSTS, {}, ["127.0.1.1"], None),  # nobody says where the other host is
        (Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2), MET, ["127.0.1.1"], None),
    ],
)
def test_the_interface_towards_the_other_hosts_is_named(
    ranks: Ranks,
    environ: Mapping[str, str],
    addresses: list[str],
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(monkeypatch, *addresses)
    elsewhere(monkeypatch)
    assert for_messages(ranks, environ) == wanted


def test_a_loopback_towards_the_others_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(network, "address_towards", lambda host: "127.0.0.1")
    assert for_messages(ONE_OF_TWO_HOSTS, MET) is None


def test_horovod_between_hosts_without_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda name: True)
    named(monkeypatch, "127.0.1.1")
    with pytest.raises(UserError, match=r"leads to no address that other hosts reach.*/etc/hosts there"):
        registry.expected("horovod", ONE_OF_TWO_HOSTS, MET, 1)
