"""An agent's ranks end when they are told to, whether they listen or not, and the root cause is what is told."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from elastic_agents import Agent, Agents, job_file, losses


def forked_ranks(agent: Agent) -> list[psutil.Process]:
    """Ranks of samestep's own command: children of the agent's fork server."""
    servers = psutil.Process(agent.process.pid).children()
    return [rank for server in servers for rank in server.children()]


@pytest.mark.timeout(90)
def test_forked_ranks_that_take_no_notice_are_ended_on_all_hosts(tmp_path: Path) -> None:
    job_file(tmp_path, steps=1000, seconds=0.1)
    with Agents(tmp_path, ("-m", "samestep", "train", "job.yaml"), "2:2", ["--notice", "60s"]) as agents:
        one, other = agents.start(0), agents.start(1)
        agents.wait_for(lambda: len(losses(tmp_path)) > 2)
        ranks = [*forked_ranks(one), *forked_ranks(other)]
        assert len(ranks) == 2
        for rank in ranks:
            rank.suspend()  # it hears nothing but SIGKILL
        one.send(signal.SIGINT)
        time.sleep(1)
        assert one.process.poll() is None
        one.send(signal.SIGINT)
        assert one.wait(20) == 130, one.text
        assert other.wait(20) == 1, other.text  # without a second signal, some seconds after it was told
        assert not any(rank.is_running() for rank in ranks)
