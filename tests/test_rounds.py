"""Faults that one host's agent reports of its rounds, whenever it polls the ranks' status."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_jobs import faults_in, wait_until

from samestep.fault_tolerance import watchdog
from samestep.fault_tolerance.status import JobInfo, RankStatus, write_job_info
from samestep.launch.membership import RoundMember
from samestep.launch.rendezvous import HostRound, RoundPost
from samestep.launch.rounds import NodeRounds, RanksEnded

pytestmark = pytest.mark.quick

LAYOUT = "dp2"


class OneHost:
    """The rendezvous of a single host, which keeps what is posted to the store."""

    node = 0
    name = "host-a"

    def __init__(self) -> None:
        self.heartbeat = self
        self.round: Any = None
        self._posts: dict[str, Any] = {}

    def post(self, key: str, value: object) -> None:
        self._posts[key] = value

    def posted(self, key: str, form: type) -> Any:
        return self._posts.get(key)

    def enter(self, *_: object) -> None:
        self.said: Mapping[int, Any] = {}

    def peers(self) -> tuple[()]:
        return ()

    def meet(self, number: int) -> None:
        """Begin a round of this host alone."""
        member = RoundMember(node=0, name=self.name, address="127.0.0.1", agent="first")
        store: Any = None
        self.round = HostRound(number=number, members=(member,), first=True, store=store)
        self.post(self.round.key, RoundPost(members=(member,)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment variables that a round sets for its ranks."""
    for name in ("ROUND", "ROUND_FOLDER", "RUN_FOLDER", "MEMORY_FOLDER", "START"):
        monkeypatch.setenv(f"SAMESTEP_{name}", "")


@pytest.fixture
def rounds(tmp_path: Path, run: Path, told: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRounds]:
    """Rounds after a first one in which rank 0 was killed in step 3; the second one has begun."""
    monkeypatch.setattr(watchdog, "_AFTER_A_DEATH", 3600.0)  # the rank that fails here is this very process
    monkeypatch.setattr(watchdog, "_LAST_WORDS", 3600.0)
    host: Any = OneHost()
    rounds = NodeRounds(host, tmp_path / "agent", tmp_path / "memory", None)
    host.meet(0)
    rounds.begin([0])
    say(tmp_path / "agent" / "round-0", run, steps=[0, 1, 2], begins=3)
    rounds.look()
    rounds.end(RanksEnded(rank=0, reason="it was ended by SIGKILL", at=0.0))
    host.meet(1)
    rounds.begin([0])
    yield rounds
    rounds.end(None)
    rounds.close(failed=False)


def say(folder: Path, run: Path, *, steps: list[int], begins: int | None = None) -> None:
    """Write the status of a round's rank as if it had taken these steps."""
    write_job_info(folder, 0, JobInfo(hang_limit=None, grace_period=0.0, layout=LAYOUT, run_folder=str(run)))
    beat = RankStatus(folder, 0)
    for step in steps:
        beat.begin(step)
        beat.end(step)
    if begins is not None:
        beat.begin(begins)
    beat.close("failed" if begins is not None else "left")


def test_a_fault_is_written_down_though_the_steps_after_it_were_done_before_the_agent_looked(
    tmp_path: Path, run: Path, rounds: NodeRounds
) -> None:
    say(tmp_path / "agent" / "round-1", run, steps=[2, 3, 4])
    wait_until(lambda: faults_in(run), 10.0)
    (fault,) = faults_in(run)
    known = {name: fault[name] for name in ("rank", "step", "goes_on_at", "steps_lost", "layout", "next_layout")}
    assert known == {
        "rank": 0,
        "step": 3,
        "goes_on_at": 2,
        "steps_lost": 1,
        "layout": LAYOUT,
        "next_layout": LAYOUT,
    }


def test_a_fault_is_written_down_though_the_next_round_ends_before_its_ranks_say_anything(
    run: Path, rounds: NodeRounds
) -> None:
    rounds.end(RanksEnded(rank=0, reason="it raised", at=1.0))
    (fault,) = faults_in(run)
    assert (fault["step"], fault["goes_on_at"]) == (3, None)


def test_a_fault_has_its_rounds_layout_though_the_ranks_said_nothing_and_fewer_go_on(
    tmp_path: Path, run: Path, told: None
) -> None:
    known = [JobInfo(hang_limit=None, grace_period=0.0, layout="dp3", run_folder=str(run))]
    host: Any = OneHost()
    rounds = NodeRounds(host, tmp_path / "agent", tmp_path / "memory", None, job_info=lambda: known[-1])
    host.meet(0)
    rounds.begin([0, 1, 2])
    known.append(replace(known[0], layout="dp2"))  # one rank is lost for good
    rounds.end(RanksEnded(rank=2, reason="it was ended by SIGKILL", at=0.0))
    host.meet(1)
    rounds.begin([0, 1])
    rounds.end(None)
    rounds.close(failed=False)
    (fault,) = faults_in(run)
    assert (fault["rank"], fault["processes"], fault["layout"], fault["next_layout"]) == (2, 3, "dp3", "dp2")
