"""Hosts that go away in the middle of a training: crashed, switched off, cut off; noticed soon, and gone on from."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from breaking_hosts import (
    ENOUGH,
    PROMISED,
    PROMISED_WHEN_KILLED,
    SILENCE,
    WHEN_CLOSED,
    WHEN_SILENT,
    WITHOUT_STORE,
    controller,
    ended_after,
    gone_on_after,
    wait_for_step,
)
from on_hosts import SAME, VARIABLES, needs_hosts, python, record, start_on
from small_jobs import RECIPE, TESTS, faults_in, job_file, losses_alone, losses_in, slow_job, steps_in, wait_until
from testbed import Cable, Testbed

pytestmark = needs_hosts()

STEPS = 60
SSH = "hostfile, over SSH"
COMMAND = "samestep launch --hostfile hosts --nodes 1:2 --max-restarts 5 -- ..."
ELASTIC = ("--nodes", "1:2", "--max-restarts", "5")
REPLICAS = {"layout": "ddp"}


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(3) as made:
        yield made


@pytest.mark.cluster
def test_a_host_that_crashes_is_named_and_ends_the_job(bed: Testbed, tmp_path: Path) -> None:
    running = controller(bed, tmp_path, slow_job(tmp_path, steps=2000, seconds=0.1, run=REPLICAS))
    first = wait_for_step(1, tmp_path / "run", running)
    wait_for_step(5, tmp_path / "run", running)
    bed["host-b"].crash()
    code, seconds = ended_after(running)
    assert code == 1
    assert "samestep: host-b was lost in the middle of the job" in running.text
    left = bed["host-a"].run(["ps", "-eo", "args"]).stdout
    # Agents and ranks by their modules: the testbed's own processes name folders of the tests.
    assert "-m samestep" not in left
    assert "samestep.launch" not in left
    tried, seen = "a host crashes, in a job that wants both", f"the job ends after {seconds:.1f} s and names it"
    record(SSH, "samestep launch --hostfile hosts -- ...", tried, seen, first)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("host", "way", "promised", "limits"),
    [
        ("host-b", "crash", PROMISED_WHEN_KILLED, WHEN_CLOSED),
        ("host-a", "crash", PROMISED_WHEN_KILLED, WHEN_CLOSED),
        ("host-b", "power_off", PROMISED, WHEN_SILENT),
    ],
)
def test_the_others_go_on_without_a_host_and_it_comes_back(
    bed: Testbed, tmp_path: Path, host: str, way: str, promised: float, limits: str
) -> None:
    run, lost, steps = tmp_path / "run", bed[host], 300
    running = controller(bed, tmp_path, slow_job(tmp_path, steps=steps, seconds=0.1, run=REPLICAS), *ELASTIC)
    first = wait_for_step(1, run, running)
    wait_for_step(6, run, running)
    getattr(lost, way)()
    seconds = gone_on_after(running)
    assert seconds < promised
    lost.boot()
    running.finish(150)
    assert losses_in(run) == pytest.approx(losses_alone(steps=steps), rel=1e-12)
    assert json.loads((run / "report.json").read_text())["processes"] == 2
    which = "the first host, which has rank 0," if host == "host-a" else "a host"
    tried = {"crash": f"{which} crashes and boots again", "power_off": f"{which} loses its power and boots again"}
    seen = f"the other goes on, the host joins again; {SAME}"
    record(SSH, COMMAND, tried[way], seen, first, recovery=seconds, limits=limits)


@pytest.mark.cluster
def test_a_killed_rank_is_started_anew_with_the_others(bed: Testbed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = {**REPLICAS, "inject": {"rank": 1, "step": 7, "fault": "kill"}}
    running = controller(bed, tmp_path, slow_job(tmp_path, steps=STEPS, seconds=0.1, run=killed), *ELASTIC)
    first = wait_for_step(1, run, running)
    running.finish(150)
    (fault,) = faults_in(run)
    assert (fault["rank"], fault["host"], "SIGKILL" in fault["cause"]) == (1, "host-b", True)
    assert fault["seconds"] < PROMISED_WHEN_KILLED
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    seen = f"all ranks start again; {SAME}"
    record(SSH, COMMAND, "a rank is killed", seen, first, recovery=fault["seconds"])


@pytest.mark.cluster
def test_a_host_whose_agent_is_told_to_stop_leaves_in_good_order(bed: Testbed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Nothing is saved but on notice.
    running = controller(
        bed, tmp_path, slow_job(tmp_path, steps=STEPS, seconds=0.1, run=REPLICAS), *ELASTIC, every=1000
    )
    first = wait_for_step(1, run, running)
    wait_for_step(10, run, running)
    bed["host-b"].run(["pkill", "-TERM", "-f", "samestep.launch.remote_agent"])
    told = running.finish(150)
    assert told.count("samestep: host-b: stopped by signal 15; the others go on, and it is tried again") == 1
    saved = re.search(r"goes on from .*, after step (\d+)", told)
    assert saved is not None
    assert int(saved[1]) >= 10
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    assert faults_in(run) == []
    tried = "a host's agent gets SIGTERM, as where its machine is shut down"
    record(SSH, COMMAND, tried, f"all save after one step, the other goes on from there; {SAME}", first)


@pytest.mark.cluster
def test_the_others_go_on_without_a_host_that_is_cut_off(bed: Testbed, tmp_path: Path) -> None:
    """It may come back when they are done, which is no failure."""
    run, host_b = tmp_path / "run", bed["host-b"]
    running = controller(bed, tmp_path, slow_job(tmp_path, steps=STEPS, seconds=0.1, run=REPLICAS), *ELASTIC)
    first = wait_for_step(1, run, running)
    wait_for_step(6, run, running)
    host_b.unplug()
    seconds = gone_on_after(running)
    host_b.plug()
    running.finish(150)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    tried = "a host's cable is pulled, and put back after the other has gone on"
    record(SSH, COMMAND, tried, f"the other goes on; {SAME}", first, recovery=seconds, limits=WHEN_SILENT)


@pytest.mark.cluster
def test_a_cable_is_pulled_while_a_rank_waits_in_an_all_reduce(bed: Testbed, tmp_path: Path) -> None:
    run, host_b = tmp_path / "run", bed["host-b"]
    args = {**RECIPE["args"], "seconds": 0.1, "folder": str(tmp_path), "call": 6}
    # A checkpoint that is saved in the meantime would have collectives of its own.
    at_once = {**REPLICAS, "checkpoint": {"asynchronous": False}}
    job = job_file(tmp_path, run=at_once, task=f"{TESTS}/held_tasks.py:HeldBack", args=args, steps=STEPS)
    running = controller(bed, tmp_path, job, *ELASTIC)
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    first = wait_for_step(1, run, running)
    wait_until(lambda: all(file.exists() for file in files), told=lambda: running.text)
    waits, held = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    host_b.unplug()
    seconds = gone_on_after(running)
    # Rank 0 was in backward, and in a collective that rank 1 had not entered: the sum of gradients.
    assert waits["waits_in"] == "_engine_run_backward"
    ahead = {group: count - held["entered"][group] for group, count in waits["entered"].items() if "0,1" in group}
    assert sum(ahead.values()) == 1
    assert seconds < PROMISED
    host_b.plug()
    running.finish(150)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    tried = "a host's cable is pulled while the other's rank waits in an all-reduce"
    record(SSH, COMMAND, tried, f"the other goes on; {SAME}", first, recovery=seconds, limits=WHEN_SILENT)


@pytest.mark.cluster
def test_a_blip_of_three_seconds_is_survived(bed: Testbed, tmp_path: Path) -> None:
    run, host_b = tmp_path / "run", bed["host-b"]
    running = controller(bed, tmp_path, slow_job(tmp_path, steps=STEPS, seconds=0.1, run=REPLICAS), *ELASTIC)
    first = wait_for_step(1, run, running)
    wait_for_step(6, run, running)
    host_b.unplug()
    began = time.monotonic()
    time.sleep(3)
    host_b.plug()
    wait_for_step(steps_in(run) + 2, run, running, 20)
    seconds = time.monotonic() - began
    running.finish(120)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    assert faults_in(run) == []
    record(SSH, COMMAND, "a cable pulled for 3 s", f"survived; {SAME}", first, recovery=seconds, limits=SILENCE)


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cable", "named"),
    [
        (Cable(delay_ms=150), "150 ms each way"),
        (Cable(rate_mbit=1, delay_ms=40, loss=0.02), "1 Mbit/s, 40 ms each way and 2 % of frames lost"),
    ],
)
def test_a_slow_link_is_taken_for_no_fault(tmp_path: Path, cable: Cable, named: str) -> None:
    run, steps = tmp_path / "run", 40
    job = slow_job(tmp_path, steps=steps, seconds=0.4, run=REPLICAS)
    with Testbed(2, racks=2, cable=cable) as far:
        running = controller(far, tmp_path, job, *ELASTIC, every=steps // 2)
        first = wait_for_step(1, run, running, 120)
        began = time.monotonic()
        told = running.finish(150)
    assert time.monotonic() - began > ENOUGH
    assert losses_in(run) == pytest.approx(losses_alone(steps=steps), rel=1e-12)
    assert faults_in(run) == []
    assert "heartbeat" not in told
    assert {place.name for place in tmp_path.glob("runs/launch-*/*/round-*")} == {"round-0"}
    record(SSH, COMMAND, f"2 hosts with {named} between them", f"{SAME}, and no host is lost", first, limits=SILENCE)


@pytest.mark.cluster
def test_the_host_with_the_store_may_die_and_the_job_goes_on_from_its_checkpoint(
    bed: Testbed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = ["samestep", "train", str(slow_job(tmp_path, steps=STEPS, seconds=0.1)), "--layout", "ddp"]
    train += ["--folder", str(run), "--checkpoint-every", "2", "--set", "run.checkpoint.resume=auto"]
    options = ["--no-ssh", "--nodes", "1:2", "--num-procs", "1", "--master-addr", "host-a", "--job-id", "job"]
    commands = [
        [*python("samestep", "launch", *options, "--node-rank", str(rank), "--max-restarts", "5"), "--", "-m", *train]
        for rank in range(2)
    ]
    _, other = start_on(bed.hosts[:2], commands, cwd=tmp_path)
    first = wait_for_step(1, run, other)
    wait_for_step(6, run, other)
    bed["host-a"].power_off()
    code, seconds = ended_after(other)
    assert code != 0
    assert seconds < 20
    assert re.search(r"samestep: .*host-a", other.text), other.text
    bed["host-b"].run(python(*train), env=VARIABLES, timeout=90)
    assert losses_in(run) == pytest.approx(losses_alone(steps=STEPS), rel=1e-12)
    tried = "the host that serves the store loses its power"
    seen = f"the other ends after {seconds:.1f} s and names it; samestep train there goes on from the last checkpoint"
    command = "samestep launch --no-ssh --node-rank N --nodes 1:2 ..."
    record("without SSH", command, tried, seen, first, limits=WITHOUT_STORE)


SOAK = TESTS.parent / "benchmarks" / "soak_hosts.py"  # faults at random moments over three hosts


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_hosts_that_die_and_cables_that_are_pulled_leave_the_bits_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    words = ["--faults", "5", "--between", "8", "--seed", "2", "--steps", "1000", "--json", str(file)]
    command = [sys.executable, str(SOAK), *words, "--kinds", "kill", "host", "cable"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert sum(found["faults"].values()) == 5
    assert {"host", "cable"} <= found["faults"].keys()
    known = {name: found[name] for name in ("same_weights", "same_losses", "samples_lost", "samples_repeated")}
    assert known == {"same_weights": True, "same_losses": True, "samples_lost": 0, "samples_repeated": 0}
    assert (found["left_processes"], found["left_files"]) == (0, 0)


@pytest.mark.cluster
def test_a_mistake_in_a_soak_is_told_before_a_host_is_made() -> None:
    command = [sys.executable, str(SOAK), "--faults", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "soak_hosts: --soak is 0; use a number of faults of 1 or more\n")
