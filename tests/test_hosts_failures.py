"""Hosts that go away in the middle of a training: crashed, switched off, cut off; noticed soon, and gone on from."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_hosts import (
    VARIABLES,
    losses_alone,
    losses_in,
    needs_hosts,
    python,
    record,
    slow_job,
    start_on,
    steps_in,
)
from testbed import Running, Testbed

pytestmark = needs_hosts()

STEPS = 60


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(3) as made:
        yield made


def wait_for_step(step: int, folder: Path, running: Running, limit: float = 60.0) -> float:
    """Wait until a run has taken so many steps; seconds that it took."""
    began = time.monotonic()
    while steps_in(folder) < step:
        assert running.poll() is None, running.text
        assert time.monotonic() - began < limit, f"step {steps_in(folder)} after {limit:.0f} s\n{running.text}"
        time.sleep(0.02)
    return time.monotonic() - began


COMMAND = "samestep launch --hostfile hosts --nodes 1:2 --max-restarts 5 -- ..."
ELASTIC = ("--nodes", "1:2", "--max-restarts", "5")


def controller(bed: Testbed, folder: Path, *options: str, steps: int = STEPS) -> Running:
    """The slow job, started over SSH from host-c on the two others."""
    hosts = folder / "hosts"
    hosts.write_text("host-a slots=1\nhost-b slots=1\n")
    train = ["-m", "samestep", "train", str(slow_job(folder, steps=steps, seconds=0.1)), "--layout", "ddp"]
    train += ["--folder", str(folder / "run"), "--checkpoint-every", "2", "--resume"]
    start = python("samestep", "launch", "--hostfile", str(hosts), *options)
    return bed["host-c"].start([*start, "--", *train], env=VARIABLES, cwd=folder)


def test_a_host_that_crashes_is_named_and_ends_the_job(bed: Testbed, tmp_path: Path) -> None:
    running = controller(bed, tmp_path, steps=2000)
    wait_for_step(5, tmp_path / "run", running)
    bed["host-b"].crash()
    began = time.monotonic()
    assert running.wait(60) == 1
    seconds = time.monotonic() - began
    assert "samestep: host-b was lost in the middle of the job" in running.text
    left = bed["host-a"].run(["ps", "-eo", "args"]).stdout
    assert "samestep" not in left
    tried, seen = "a host crashes, in a job that wants both", f"the job ends after {seconds:.1f} s and names it"
    record("hostfile, over SSH", "samestep launch --hostfile hosts -- ...", tried, seen)


def gone_on_after(running: Running) -> float:
    """Seconds from now to the first step of ranks that were started anew.

    How long it may take by the limits that samestep promises, benchmarks/hosts.py measures on a quiet machine.
    """
    began = time.monotonic()
    while "s to the next step" not in running.text:
        assert running.poll() is None, running.text
        assert time.monotonic() - began < 60, running.text
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["crash", "power_off"])
def test_the_others_go_on_without_a_host_and_it_comes_back(bed: Testbed, tmp_path: Path, way: str) -> None:
    run, host_b, steps = tmp_path / "run", bed["host-b"], 300
    running = controller(bed, tmp_path, *ELASTIC, steps=steps)
    wait_for_step(6, run, running)
    getattr(host_b, way)()
    seconds = gone_on_after(running)
    host_b.boot()
    running.finish(150)
    assert losses_in(run) == pytest.approx(losses_alone(steps=steps), rel=1e-12)
    assert json.loads((run / "report.json").read_text())["processes"] == 2
    tried = {"crash": "a host crashes and boots again", "power_off": "a host loses its power and boots again"}
    seen = f"the other goes on after {seconds:.1f} s, the host joins again; the losses of one process"
    record("hostfile, over SSH", COMMAND, tried[way], seen)


@pytest.mark.cluster
def test_the_others_go_on_without_a_host_that_is_cut_off(bed: Testbed, tmp_path: Path) -> None:
    """It may come back when they are done, which is no failure."""
    run, host_b = tmp_path / "run", bed["host-b"]
    running = controller(bed, tmp_path, *ELASTIC)
    wait_for_step(6, run, running)
    host_b.unplug()
    seconds = gone_on_after(running)
    host_b.plug()
    running.finish(150)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    seen = f"the other goes on after {seconds:.1f} s; the losses of one process"
    record("hostfile, over SSH", COMMAND, "a host's cable is pulled, and put back after the other has gone on", seen)


@pytest.mark.cluster
def test_a_blip_of_three_seconds_is_survived(bed: Testbed, tmp_path: Path) -> None:
    run, host_b = tmp_path / "run", bed["host-b"]
    running = controller(bed, tmp_path, *ELASTIC)
    wait_for_step(6, run, running)
    host_b.unplug()
    time.sleep(3)
    host_b.plug()
    seconds = wait_for_step(steps_in(run) + 2, run, running, 20)
    running.finish(120)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    seen = f"survived: the next step came after {3 + seconds:.1f} s; the losses of one process"
    record("hostfile, over SSH", COMMAND, "a cable pulled for 3 s", seen)


@pytest.mark.cluster
def test_the_host_with_the_store_may_die_and_the_job_goes_on_from_its_checkpoint(
    bed: Testbed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = ["samestep", "train", str(slow_job(tmp_path, steps=STEPS, seconds=0.1)), "--layout", "ddp"]
    train += ["--folder", str(run), "--checkpoint-every", "2", "--resume"]
    options = ["--no-ssh", "--nodes", "1:2", "--num-procs", "1", "--master-addr", "host-a", "--job-id", "job"]
    commands = [
        [*python("samestep", "launch", *options, "--node-rank", str(rank), "--max-restarts", "5"), "--", "-m", *train]
        for rank in range(2)
    ]
    _, other = start_on(bed.hosts[:2], commands)
    wait_for_step(6, run, other)
    bed["host-a"].power_off()
    began = time.monotonic()
    code = other.wait(60)
    seconds = time.monotonic() - began
    assert code != 0
    assert seconds < 25
    assert re.search(r"samestep: .*host-a", other.text), other.text
    bed["host-b"].run(python(*train), env=VARIABLES, timeout=90)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    tried = "the host that serves the store loses its power"
    seen = f"the other ends after {seconds:.1f} s and names it; samestep train there goes on from the last checkpoint"
    record("without SSH", "samestep launch --no-ssh --node-rank N --nodes 1:2 ...", tried, seen)
