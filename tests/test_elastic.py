"""Jobs of several agents that lose one: noticed soon, gone on from the last checkpoint, joined again."""

import re
import signal
import time
from pathlib import Path

import pytest
from elastic_agents import Agents, elastic_job
from launching import free_port
from small_jobs import faults_in, losses_alone, losses_in, steps_in

from samestep.cli.main import main
from samestep.launch.network import reach

TRAIN = ("-m", "samestep", "train", "job.yaml")
STEPS = 60


@pytest.mark.slow
def test_every_round_has_a_store_of_its_own(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "two_rounds.py")
    with Agents(tmp_path, [script], "2:2", ["--max-restarts", "1"]) as agents:
        one, other = agents.start(0), agents.start(1)
        assert (one.wait(120), other.wait(120)) == (0, 0), one.text + other.text
        for agent in (one, other):
            told = re.findall(r"\] round (\d) port (\d+) restart (\d) (\w+)", agent.text)
            assert [(number, restart, found) for number, _, restart, found in told] == [
                ("0", "0", "False"),
                ("1", "1", "False"),
            ]
            assert told[0][1] != told[1][1]
        assert "failed before its first step: exit code 3" in one.text


@pytest.mark.slow
def test_a_killed_rank_is_named_and_all_hosts_go_on(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=9, inject={"rank": 1, "step": 7, "fault": "kill"})
    with Agents(tmp_path, TRAIN, "2:2", ["--max-restarts", "1"]) as agents:
        one, other = agents.start(0), agents.start(1)
        assert (one.wait(120), other.wait(120)) == (0, 0), one.text + other.text
        told = [line for line in (one.text + other.text).splitlines() if "goes on at step" in line]
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=9), rel=1e-12)
    (fault,) = faults_in(tmp_path / "run")
    known = {name: fault[name] for name in ("round", "rank", "step", "goes_on_at", "steps_lost", "layout")}
    assert known == {"round": 0, "rank": 1, "step": 7, "goes_on_at": 6, "steps_lost": 1, "layout": "dp2"}
    assert "SIGKILL" in fault["cause"]
    assert 0 < fault["seconds"] < 90  # tens of seconds on a busy machine
    (line,) = told
    assert line.startswith(f"samestep: rank 1 on {fault['host']} failed in step 7: ")


@pytest.mark.slow
def test_a_lost_hosts_state_comes_from_its_neighbours_memory(tmp_path: Path) -> None:
    checkpoint = {"every": 1000, "memory": 2, "resume": "auto"}
    elastic_job(tmp_path, steps=STEPS, seconds=0.1, checkpoint=checkpoint, max_restarts=1, layout="fsdp2")
    with Agents(tmp_path, TRAIN, "1:2", ["--max-restarts", "1"]) as agents:
        here, there = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 8)
        there.kill()
        assert here.wait(90) == 0, here.text
    (fault,) = faults_in(tmp_path / "run")
    assert fault["goes_on_at"] >= 4  # nothing is on the disk
    assert "samestep-memory-" in here.text
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=STEPS), rel=1e-9)


@pytest.mark.slow
def test_a_pause_is_survived_and_a_death_is_not_waited_for(tmp_path: Path) -> None:
    steps_in_all = 2 * STEPS  # more than the pauses here take
    elastic_job(tmp_path, steps=steps_in_all, seconds=0.1)
    with Agents(tmp_path, TRAIN, "1:2", ["--max-restarts", "1"]) as agents:
        here, there = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 3)
        # The ranks go on beside the paused agent: 20 steps take 2 s or more, in which it sends no heartbeat.
        paused = steps_in(tmp_path / "run")
        there.send(signal.SIGSTOP)
        agents.wait_for(lambda: steps_in(tmp_path / "run") >= paused + 20)
        there.send(signal.SIGCONT)
        agents.wait_for(lambda: steps_in(tmp_path / "run") >= paused + 40)
        assert faults_in(tmp_path / "run") == []
        steps = steps_in(tmp_path / "run")
        there.kill()
        agents.wait_for(lambda: faults_in(tmp_path / "run"), limit=30)
        assert here.wait(120) == 0, here.text
    (fault,) = faults_in(tmp_path / "run")
    assert (fault["rank"], fault["next_layout"]) == (1, "single")
    assert fault["cause"] == "its host is gone"
    assert fault["goes_on_at"] >= steps - 3
    assert fault["seconds"] < 20
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=steps_in_all), rel=1e-9)


@pytest.mark.slow
def test_a_host_that_says_nothing_is_lost_and_joins_again(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=250, seconds=0.1)
    with Agents(tmp_path, TRAIN, "1:2", ["--max-restarts", "3", "--heartbeat-timeout", "4s"]) as agents:
        here, there = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 3)
        there.send(signal.SIGSTOP, to_all=True)  # its connections stand, and nothing comes
        agents.wait_for(lambda: "has sent no heartbeat for" in here.text, limit=10)
        agents.wait_for(lambda: faults_in(tmp_path / "run"), limit=20)
        there.kill()
        before = steps_in(tmp_path / "run")
        agents.start(1)
        agents.wait_for(lambda: "joins; goes on at step" in here.text)
        after = steps_in(tmp_path / "run")
        assert here.wait(90) == 0, here.text
    assert after >= before  # what was taken was saved before the ranks started again
    assert len(faults_in(tmp_path / "run")) == 1
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=250), rel=1e-9)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_its_own_host(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=9, hang_limit="3s", inject={"rank": 1, "step": 7, "fault": "hang"})
    with Agents(tmp_path, TRAIN, "2:2", ["--max-restarts", "1"]) as agents:
        one, other = agents.start(0), agents.start(1)
        assert (one.wait(90), other.wait(90)) == (0, 0), one.text + other.text
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=9), rel=1e-12)
    (fault,) = faults_in(tmp_path / "run")
    assert (fault["rank"], fault["step"], fault["goes_on_at"]) == (1, 7, 6)
    assert fault["cause"].startswith("it hung in step 7")
    assert "injection.py" in fault["reason"]


@pytest.mark.slow
def test_a_host_that_is_told_to_stop_lets_all_save(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=STEPS, seconds=0.1, checkpoint={"every": 1000, "resume": "auto"})
    with Agents(tmp_path, TRAIN, "1:2") as agents:
        here, there = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 10)
        there.send(signal.SIGTERM)
        assert there.wait(30) == 143, there.text
        assert here.wait(90) == 0, here.text
    assert faults_in(tmp_path / "run") == []
    first = re.search(r"goes on from .*, after step (\d+)", here.text)
    assert first is not None
    assert int(first[1]) > 10  # saved on notice: none was due
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=STEPS), rel=1e-9)


@pytest.mark.slow
def test_any_script_has_the_notice_to_save_where_a_host_joins(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "saves_on_notice.py")
    with Agents(tmp_path, [script, str(tmp_path)], "1:2", ["--join-timeout", "1s"]) as agents:
        here = agents.start(0)
        agents.wait_for((tmp_path / "of-1").exists)
        there = agents.start(1)
        assert (here.wait(120), there.wait(120)) == (0, 0), here.text + there.text
    assert (tmp_path / "of-2").exists()
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=9, layout="tp3")
    with Agents(tmp_path, TRAIN, "2:2", ["--max-restarts", "3"]) as agents:
        one, other = agents.start(0), agents.start(1)
        codes = one.wait(120), other.wait(120)
    said = 'samestep: layout "tp3" needs 3 processes, not 2; ask for 3 processes'
    # Both ranks may exit by themselves, or one agent ends its rank when the other reports the mistake. Either way,
    # both agents exit with the code of a user's mistake.
    assert codes == (2, 2), one.text + other.text
    for agent in (one, other):
        assert agent.text.splitlines().count(said) == 1, agent.text
    assert sorted(path.name for path in tmp_path.rglob("rank-*.out")) == ["rank-0.out", "rank-1.out"]  # each once


@pytest.mark.slow
def test_without_the_store_the_job_ends_soon_and_can_go_on_elsewhere(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=STEPS, seconds=0.1)
    with Agents(tmp_path, TRAIN, "1:2", ["--max-restarts", "1"]) as agents:
        keeper, other = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 3)
        keeper.kill()
        began = time.monotonic()
        assert other.wait(20) == 1
        assert time.monotonic() - began < 20
        assert "the job's store at 127.0.0.1" in other.text
        assert "started again with --resume" in other.text
        steps = steps_in(tmp_path / "run")
        assert agents.start(0, "--join-timeout", "1s").wait(120) == 0
        first = steps_in(tmp_path / "run")
    assert 3 < steps < STEPS == first
    assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=STEPS), rel=1e-9)


def test_a_silence_limit_that_ends_every_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--no-ssh", "--node-rank", "0", "--num-nodes", "2", "--heartbeat-timeout", "1s"]
    assert main([*words, "--", "true"]) == 2
    assert "hosts send a heartbeat every 0.5 s; use 2 s or more" in capsys.readouterr().err


def test_whether_anything_listens_on_a_port() -> None:
    port = free_port()
    assert reach("127.0.0.1", port, within=1.0) == "refuses"
