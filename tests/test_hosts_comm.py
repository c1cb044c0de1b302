"""`samestep comm` on two hosts: every collective right and timed beside the link between them."""

import json
from pathlib import Path

import pytest
from on_hosts import VARIABLES, needs_hosts, python, start_on, torchrun
from testbed import Cable, Testbed

from samestep.comm.collectives import COLLECTIVES

pytestmark = [needs_hosts(ssh=False), pytest.mark.cluster]

RATE = 200e6 / 8  # bytes a second of the cable


def test_two_ranks_on_each_of_two_hosts_have_every_transport_measured(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    some = "all-reduce,broadcast,all-gather,reduce-scatter"
    words = ["--sizes", "1KB,1MB", "--collectives", some, "--seconds", "0.05", "--json", str(file), "--force"]
    with Testbed(2, cable=Cable(rate_mbit=1000), ssh=False) as bed:
        commands = [torchrun(rank, 2, ["samestep", "comm", *words], ranks=2) for rank in range(2)]
        for command in start_on(bed.hosts, commands):
            command.finish(150)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["passed"]
    assert found["hosts"] == ["host-a", "host-a", "host-b", "host-b"]
    measured = {(row["collective"], row["transport"]) for row in found["rows"]}
    assert measured >= {(name, "gloo") for name in some.split(",")}
    assert ("all-reduce", "shared-memory") in measured  # first within each host


@needs_hosts(ssh=True)
def test_the_launcher_starts_a_demonstration_over_ssh_and_nothing_else_is_said(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("host-a slots=1\nhost-b slots=1\n", encoding="utf-8")
    command = python("samestep", "launch", "--hostfile", str(hostfile), "--", "-m", "samestep", "comm", "demo")
    with Testbed(2) as bed:
        said = bed["host-a"].start([*command, "broadcast"], env=VARIABLES, cwd=tmp_path).finish(90)
    assert said.count("[host-a 0] │") == 2
    assert "│    1 │ 20 21 22 23 │ 10 11 12 13 │" in said
    assert "Warning" not in said
    assert "[c10d]" not in said  # that a host without a name of its own has none


def test_collectives_are_timed_beside_the_link(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    words = ["--sizes", "1KB,4MB", "--seconds", "0.1", "--json", str(file), "--force"]
    with Testbed(2, racks=2, cable=Cable(rate_mbit=200), ssh=False) as bed:
        commands = [torchrun(rank, 2, ["samestep", "comm", *words]) for rank in range(2)]
        for command in start_on(bed.hosts, commands):
            command.finish(150)
        shown = [torchrun(rank, 2, ["samestep", "comm", "demo", "all-reduce"], ranks=2) for rank in range(2)]
        first, other = [command.finish(90) for command in start_on(bed.hosts, shown)]
        tried = [torchrun(rank, 2, ["samestep", "comm", "support"]) for rank in range(2)]
        support = next(command.finish(90) for command in start_on(bed.hosts, tried))
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["hosts"] == ["host-a", "host-b"]
    assert found["passed"]
    assert {row["collective"] for row in found["rows"]} == set(COLLECTIVES)
    # The cable's own rate, not what the virtual adapter's driver says.
    assert found["limits"]["adapter_bytes_per_second"] is None
    assert found["limits"]["stream_bytes_per_second"] == pytest.approx(RATE, rel=0.25)
    of_all_reduce = [row for row in found["rows"] if row["collective"] == "all-reduce"]
    assert of_all_reduce[-1]["bus_bandwidth"] < 1.3 * RATE
    assert of_all_reduce[-1]["bus_bandwidth"] > 0.3 * RATE
    assert "│    3 │ 40 41 42 43 │ 100 104 108 112 │" in first
    assert "│" not in other  # one rank tells it
    assert "gloo with tensors on cpu, tried on 2 ranks" in support
