"""Three hosts become one, and three again: the same global batch and the same losses, whoever is there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from breaking_hosts import WHEN_CLOSED, controller, gone_on_after, wait_for_step
from on_hosts import needs_hosts, record
from small_jobs import (
    BATCH,
    RECIPE,
    SAMPLES,
    TESTS,
    faults_in,
    job_file,
    lines_in,
    losses_alone,
    losses_in,
    steps_in,
    wait_until,
)
from testbed import Running, Testbed

pytestmark = [needs_hosts(), pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 600
HOSTS = ("host-a", "host-b", "host-c")
COMMAND = "samestep launch --hostfile hosts --nodes 1:3 --max-restarts 5 -- ..."
SEEN = "the other goes on alone, then with both; the global batch stays, the losses of one process"


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(4) as made:
        yield made


def start(bed: Testbed, folder: Path, **checkpoint: Any) -> Running:
    """Shards on three hosts, in steps that take their time until there is a file `hurry`."""
    args = {**RECIPE["args"], "seconds": 0.1, "until": str(folder / "hurry")}
    run = {"layout": "fsdp3", "elastic": True, "max_restarts": 5, "checkpoint": checkpoint}
    job = job_file(folder, run=run, task=f"{TESTS}/held_tasks.py:Paced", args=args, steps=STEPS)
    options = ("--nodes", "1:3", "--max-restarts", "5")
    return controller(bed, folder, job, *options, every=checkpoint["every"], on=HOSTS)


def grow_again(bed: Testbed, folder: Path, running: Running) -> None:
    """Boot both hosts, see them join, and the job end as it does without a fault."""
    run = folder / "run"
    alone = steps_in(run)
    wait_for_step(alone + 3, run, running)
    for name in HOSTS[1:]:
        bed[name].boot()
    all_there = re.compile(r"joins; goes on at step \d+ with layout fsdp3")
    wait_until(lambda: all_there.search(running.text), 120, told=lambda: running.text)
    wait_for_step(steps_in(run) + 3, run, running)
    assert steps_in(run) < STEPS
    (folder / "hurry").touch()
    running.finish(120)
    steps = lines_in(run / "metrics.jsonl")
    an_epoch = -(-SAMPLES // BATCH)
    assert [step["samples"] for step in steps] == [
        min(BATCH, SAMPLES - BATCH * (number % an_epoch)) for number in range(STEPS)
    ]
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-9)
    assert json.loads((run / "report.json").read_text(encoding="utf-8"))["processes"] == 3


def test_two_of_three_hosts_crash_at_once_and_come_back(bed: Testbed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(bed, tmp_path, every=5)
    first = wait_for_step(1, run, running)
    wait_for_step(12, run, running)
    for name in HOSTS[1:]:
        bed[name].crash()
    seconds = gone_on_after(running)
    wait_until(lambda: faults_in(run))  # it is said first, and then written
    fault = faults_in(run)[-1]
    assert (fault["layout"], fault["next_layout"], fault["processes"]) == ("fsdp3", "single", 3)
    assert fault["goes_on_at"] >= 5
    grow_again(bed, tmp_path, running)
    tried = "2 of 3 hosts crash at once and boot again; a checkpoint every 5 steps"
    record("hostfile, over SSH", COMMAND, tried, SEEN, first, recovery=seconds, limits=WHEN_CLOSED)


def test_two_of_three_hosts_crash_one_by_one_and_memory_has_their_state(bed: Testbed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(bed, tmp_path, every=10 * STEPS, memory=2)
    first = wait_for_step(1, run, running)
    took = []
    for name in HOSTS[1:]:
        wait_for_step(steps_in(run) + 8, run, running)  # some copies are made
        bed[name].crash()
        took.append(gone_on_after(running, faults=len(took) + 1))
        wait_until(lambda: len(faults_in(run)) == len(took))  # it is said first, and then written
    assert [fault["next_layout"] for fault in faults_in(run)] == ["fsdp2", "single"]
    assert all(fault["goes_on_at"] > 0 for fault in faults_in(run))
    assert not list((run / "checkpoints").glob("step-*"))  # nothing was on the disk
    assert "samestep-memory-" in running.text
    grow_again(bed, tmp_path, running)
    tried = "2 of 3 hosts crash one by one and boot again; copies in memory every 2 steps"
    record("hostfile, over SSH", COMMAND, tried, SEEN, first, recovery=max(took), limits=WHEN_CLOSED)
