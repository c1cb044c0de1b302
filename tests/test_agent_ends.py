"""An agent's ranks end when they are told to, whether they listen or not, and the root cause is what is told."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from elastic_agents import Agent, Agents, elastic_job
from small_jobs import steps_in

from samestep.fault_tolerance import signals
from samestep.launch import agent
from samestep.launch.failure import Failure
from samestep.launch.handshake import Handshake
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import RankOptions


def forked_ranks(one: Agent) -> list[psutil.Process]:
    """Ranks of samestep's own command: children of the agent's fork server."""
    servers = psutil.Process(one.process.pid).children()
    return [rank for server in servers for rank in server.children()]


def told_to_end(rank: psutil.Process) -> bool:
    """Whether a signal waits for a rank that is suspended."""
    status = Path(f"/proc/{rank.pid}/status").read_text(encoding="ascii")
    return any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))


@pytest.mark.slow
def test_forked_ranks_that_take_no_notice_are_ended_on_all_hosts(tmp_path: Path) -> None:
    elastic_job(tmp_path, steps=1000, seconds=0.1)
    with Agents(tmp_path, ("-m", "samestep", "train", "job.yaml"), "2:2", ["--grace-period", "60s"]) as agents:
        one, other = agents.start(0), agents.start(1)
        agents.wait_for(lambda: steps_in(tmp_path / "run") > 2)
        ranks = [*forked_ranks(one), *forked_ranks(other)]
        assert len(ranks) == 2
        for rank in ranks:
            rank.suspend()  # it hears nothing but SIGKILL
        one.send(signal.SIGINT)
        agents.wait_for(lambda: told_to_end(ranks[0]))
        # Signals that follow each other sooner count as one, by the agent's own clock: nothing that is seen from
        # outside changes when the time is over. It has begun, since a rank was told.
        time.sleep(signals.SECOND_SIGNAL)
        assert one.process.poll() is None
        one.send(signal.SIGINT)
        assert one.wait(20) == 130, one.text
        assert other.wait(20) == 1, other.text  # without a second signal, some seconds after it was told
        assert not any(rank.is_running() for rank in ranks)


LIMIT = 4.0  # seconds; less than those after which the host would end its children
assert LIMIT < agent._AFTER_END


class ToldByItself:
    """A store in which only this host reports the job's end, and does so while its own thread polls for it."""

    def __init__(self) -> None:
        self.asked, self.told = threading.Event(), threading.Event()
        self._looking = threading.current_thread()

    def tell_failure(self, failure: Failure) -> None:
        self.told.set()
        # Until the host has looked at what it was told, and its thread has done with that.
        self._looking.join(LIMIT)
        assert not self._looking.is_alive()

    def ended(self) -> str | None:
        self._looking = threading.current_thread()
        self.asked.set()
        return "a rank on host-a failed" if self.told.wait(LIMIT) else None


def test_a_host_takes_its_own_failure_for_no_end_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    monkeypatch.setattr(agent, "_LOOK", 0.01)
    spec = NodeSpec(job="one", host="host-a", num_procs=1, command=("x",), ranks=RankOptions(logs="logs"))
    store = ToldByItself()
    ranks = agent._Ranks(spec, ["x"], agent.stop_signals(), cast(Handshake, store))
    failure = Failure(host="host-a", rank=0, exit_code=1, reason="ValueError: planted", log="rank-0.err", at=0.0)
    with ranks._watch():
        assert store.asked.wait(LIMIT)
        outcome = ranks._failed(lambda: failure)
    assert store.told.is_set()
    assert killed == []
    assert outcome.exit_code == 1
    assert outcome.message is not None
    assert "ValueError: planted" in outcome.message
