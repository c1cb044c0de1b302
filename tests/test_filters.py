"""Hosts and slots that a job takes: include, exclude, so many hosts and ranks, visible devices; every wrong input."""

from pathlib import Path

import pytest

from samestep import environment
from samestep.errors import UserError
from samestep.launch.environments.base import Cluster, FoundCluster, Host, Slots
from samestep.launch.filters import apply
from samestep.launch.options import HostOptions

pytestmark = pytest.mark.quick


def found(*slots: int, this: int | None = None, slots_from: Slots = "listed") -> FoundCluster:
    """Hosts worker-1, worker-2 and so on, with these slots."""
    hosts = tuple(Host(name=f"worker-{index}", slots=count) for index, count in enumerate(slots, start=1))
    return FoundCluster(cluster=Cluster(place="hostfile", hosts=hosts, this=this), slots_from=slots_from)


def left(of: FoundCluster, filters: HostOptions, environ: dict[str, str] | None = None) -> dict[str, list[int]]:
    """The slots of each host that is left."""
    hosts = apply(of, filters, environ or {}).cluster.hosts
    for host in hosts:
        assert host.chosen is None or len(host.chosen) == host.slots
    return {host.name: list(range(host.slots)) if host.chosen is None else list(host.chosen) for host in hosts}


# The first of these are the examples in the documentation of DeepSpeed's launcher.
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (HostOptions(), {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3], "worker-3": [0, 1]}),
        (HostOptions(include="worker-1@worker-2:0,2"), {"worker-1": [0, 1, 2, 3], "worker-2": [0, 2]}),
        (HostOptions(include="worker-2:0,1"), {"worker-2": [0, 1]}),
        (HostOptions(include="worker-2:1,0,1"), {"worker-2": [0, 1]}),
        (HostOptions(include="worker-3@worker-1:3"), {"worker-1": [3], "worker-3": [0, 1]}),
        (HostOptions(include="worker-2:0@worker-2:3"), {"worker-2": [0, 3]}),
        (HostOptions(include="worker-2:0@worker-2"), {"worker-2": [0, 1, 2, 3]}),
        (HostOptions(exclude="worker-2:0@worker-3:0,1"), {"worker-1": [0, 1, 2, 3], "worker-2": [1, 2, 3]}),
        (HostOptions(exclude="worker-1"), {"worker-2": [0, 1, 2, 3], "worker-3": [0, 1]}),
        (HostOptions(exclude="worker-1@worker-1:0"), {"worker-2": [0, 1, 2, 3], "worker-3": [0, 1]}),
        (HostOptions(num_nodes=2), {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}),
        (HostOptions(num_procs=2), {"worker-1": [0, 1], "worker-2": [0, 1], "worker-3": [0, 1]}),
        (HostOptions(num_nodes=1, num_procs=3), {"worker-1": [0, 1, 2]}),
        (HostOptions(include="worker-2:1,3@worker-3", num_procs=1), {"worker-2": [1], "worker-3": [0]}),
        (HostOptions(exclude="worker-1:0", num_nodes=1), {"worker-1": [1, 2, 3]}),
    ],
)
def test_what_is_left(filters: HostOptions, expected: dict[str, list[int]]) -> None:
    assert left(found(4, 4, 2), filters) == expected


def test_localhost_is_this_machine_whatever_it_is_called() -> None:
    assert left(found(4, 4, this=1), HostOptions(include="localhost:0,1")) == {"worker-2": [0, 1]}


def test_an_address_with_colons_stands_in_brackets() -> None:
    hosts = (Host(name="fd00::7", slots=4), Host(name="10.0.0.8", slots=2))
    of = FoundCluster(cluster=Cluster(place="hostfile", hosts=hosts))
    assert left(of, HostOptions(include="[fd00::7]:1,2@10.0.0.8:1")) == {"fd00::7": [1, 2], "10.0.0.8": [1]}
    assert left(of, HostOptions(exclude="fd00::7")) == {"10.0.0.8": [0, 1]}


@pytest.mark.parametrize(("include", "this"), [("worker-2", 0), ("worker-1@worker-3", None)])
def test_this_machine_is_still_known(include: str, this: int | None) -> None:
    assert apply(found(1, 1, 1, this=1), HostOptions(include=include), {}).cluster.this == this


def test_more_ranks_than_cores_share_them() -> None:
    assert left(found(2, this=0, slots_from="cores"), HostOptions(num_procs=4)) == {"worker-1": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("value", "devices"),
    [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("0,-1,2", ("0",)), (" GPU-ab , MIG-cd", ("GPU-ab", "MIG-cd"))],
)
@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_visible_devices_are_read(variable: str, value: str, devices: tuple[str, ...]) -> None:
    visible = environment.visible_devices({variable: value})
    assert visible == environment.VisibleDevices(variable=variable, devices=devices)


def test_only_visible_devices_of_this_machine_are_slots() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert left(found(4, 4, this=1), HostOptions(), environ) == {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1]}
    assert left(found(4, 4), HostOptions(), environ) == {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}
    # On the CPU the variable says nothing about cores, and an empty one asks for the CPU.
    assert left(found(4, this=0, slots_from="cores"), HostOptions(), environ) == {"worker-1": [0, 1, 2, 3]}
    assert left(found(4, this=0), HostOptions(), {"CUDA_VISIBLE_DEVICES": ""}) == {"worker-1": [0, 1, 2, 3]}
    with pytest.raises(UserError, match="slots 0 to 1, and no slot 2"):
        left(found(4, this=0), HostOptions(include="localhost:2"), environ)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (HostOptions(include="worker-1", exclude="worker-2"), "--include and --exclude are both given"),
        (HostOptions(include="worker-9"), 'there is no host "worker-9"; did you mean'),
        (HostOptions(exclude="worker-9:0"), 'there is no host "worker-9"'),
        (HostOptions(include="localhost:0"), 'there is no host "localhost"; known: worker-1, worker-2, worker-3'),
        (HostOptions(include="worker-3:1,2"), "worker-3 has slots 0 to 1, and no slot 2"),
        (HostOptions(exclude="worker-1:4"), "worker-1 has slots 0 to 3, and no slot 4"),
        (HostOptions(include="worker-1:a"), "names no slots of a host; write HOST"),
        (HostOptions(include="worker-1:"), "names no slots of a host"),
        (HostOptions(include="worker-1:0,,1"), "names no slots of a host"),
        (HostOptions(include="worker-1:-1"), "names no slots of a host"),
        (HostOptions(include="worker-1 worker-2"), 'hosts are separated by @; write "worker-1@worker-2"'),
        (HostOptions(exclude="worker-1,worker-2"), 'hosts are separated by @; write "worker-1@worker-2"'),
        (HostOptions(include="worker-1:0 worker-2:1"), 'hosts are separated by @; write "worker-1:0@worker-2:1"'),
        (HostOptions(include=""), "names no slots of a host"),
        (HostOptions(include="worker-1@"), "names no slots of a host"),
        (HostOptions(exclude="worker-1@worker-2@worker-3:0,1"), "leaves no slot of worker-1, worker-2, worker-3"),
        (HostOptions(num_nodes=0), "--num-nodes is 0, and there are 3: worker-1, worker-2, worker-3"),
        (HostOptions(num_nodes=4), "a number from 1 to 3"),
        (HostOptions(num_procs=0), "--num-procs is 0; it must be a whole number from 1 to 1,024"),
        (HostOptions(num_procs=3), "worker-3 has 2 slots; use 2 or fewer, or --exclude worker-3"),
        (HostOptions(include="worker-3:1", num_procs=2), "worker-3 has 1 slot; use 1"),
    ],
)
def test_what_is_asked_for_and_not_there(filters: HostOptions, message: str) -> None:
    with pytest.raises(UserError) as error:
        apply(found(4, 4, 2), filters, {})
    assert message in str(error.value)


def test_chosen_cores_are_not_shared() -> None:
    with pytest.raises(UserError, match="worker-1 has 1 slot"):
        apply(found(2, this=0, slots_from="cores"), HostOptions(include="localhost:1", num_procs=2), {})


@pytest.mark.parametrize("text", ["worker-1 slots=4\n# a comment\n\nworker-2 slots=4  # another\n"])
def test_a_hostfile_and_filters_together(tmp_path: Path, text: str) -> None:
    from samestep.launch.environments.hostfile import read_hostfile

    (tmp_path / "hosts").write_text(text, encoding="utf-8")
    hosts, _ = read_hostfile(tmp_path / "hosts")
    of = FoundCluster(cluster=Cluster(place="hostfile", hosts=hosts))
    assert left(of, HostOptions(include="worker-2:0,1")) == {"worker-2": [0, 1]}
