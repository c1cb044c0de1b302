"""Hosts that stay away, give up or are told to stop, while the others of their job go on."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep.launch import controller
from samestep.launch.controller import AgentEnded, AgentMessage, Controller, Event
from samestep.launch.failure import Failure, JobOutcome, first_of
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import RankOptions
from samestep.launch.starter import AgentCommand

TRIES = 5
GONE = "gone"  # the host is never reached
REACHING = "reaching"  # nothing is known of it yet
LOST = "lost"  # it was reached, and is lost
DONE = JobOutcome()

# What a host says, the first time that it is brought up, the second time, ...; None: its ranks work.
Says = JobOutcome | str | None


class Reached:
    """What stands for the process by which hosts are reached."""

    says: Mapping[str, Sequence[Says]]
    tries: dict[str, list[float]]
    waits: list[float]  # how long worker-2 is waited for, as often as it is lost
    working: "list[Reached]"

    def __init__(self, agents: AgentCommand, request: bytes, events: "SimpleQueue[Event]") -> None:
        self.agents = agents
        self.began = time.monotonic()
        self.started: set[str] = set()
        self.orders: list[str] = []
        self._events = events
        self._works: set[str] = set()
        for host in agents.hosts.split(", "):
            tries = self.tries.setdefault(host, [])
            words = self.says[host]
            says = words[min(len(tries), len(words) - 1)]
            tries.append(time.monotonic())
            self._reaching = says == REACHING
            if says in (GONE, REACHING):
                continue
            self._tell(host, started=True)
            if isinstance(says, JobOutcome):
                self._tell(host, outcome=says.to_json())
            elif says is None:
                self._works.add(host)
        if self._works or self._reaching:
            self.working.append(self)
        else:
            self._end()

    def _tell(self, host: str, **values: Any) -> None:
        self._events.put(AgentMessage(connection=self, values={"host": host, **values}))  # pyright: ignore[reportArgumentType]

    def _end(self) -> None:
        self._events.put(AgentEnded(connection=self))  # pyright: ignore[reportArgumentType]

    def work_ends(self, outcome: JobOutcome = DONE) -> None:
        for host in self._works:
            self._tell(host, outcome=outcome.to_json())
        self._works = set()
        self._end()

    def let_go(self) -> Sequence[Any]:
        return ()

    def order(self, text: str) -> None:
        self.orders.append(text)
        self.work_ends(JobOutcome(exit_code=143, message="stopped by signal 15"))

    def why(self, hosts: Sequence[str]) -> str:
        if hosts[0] in self.started:
            return f"{hosts[0]} was lost in the middle of the job"
        return f"{hosts[0]} can't be reached"

    def kill(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobOutcome]:
    """Run a job whose hosts say so; it ends when worker-2, or what is given, has been tried so often."""
    monkeypatch.setattr(controller, "AgentConnection", Reached)
    monkeypatch.setattr(controller, "_FIRST_WAIT", 0.1)
    monkeypatch.setattr(controller, "_LONGEST_WAIT", 0.4)
    monkeypatch.setattr(controller, "_AFTER_END", 0.1)

    def run(says: Mapping[str, Sequence[Says]], *, tries: int = 1, together: bool = False) -> JobOutcome:
        monkeypatch.setattr(Reached, "says", says, raising=False)
        monkeypatch.setattr(Reached, "tries", {}, raising=False)
        monkeypatch.setattr(Reached, "working", [], raising=False)
        specs = [
            NodeSpec(job="one", host=host, num_procs=1, command=("x",), ranks=RankOptions(logs="logs"))
            for host in says
        ]
        groups = [tuple(specs)] if together else [(spec,) for spec in specs]
        job = Controller(
            [AgentCommand(command=("ssh",), specs=group) for group in groups], ".", {}, grace_period=0.1, elastic=True
        )
        monkeypatch.setattr(Reached, "waits", [], raising=False)
        await_again = job._await

        def note(*lost: Any) -> None:
            await_again(*lost)
            Reached.waits += job._waits.values()

        monkeypatch.setattr(job, "_await", note)
        take = job._take

        def take_and_end() -> None:
            take()
            enough = len(Reached.tries["worker-2"]) >= tries and job._events.empty()
            if enough and not job._again and not job._orders:
                for each in Reached.working:
                    if each in job._connections:
                        each.work_ends()

        monkeypatch.setattr(job, "_take", take_and_end)
        return job.run()

    return run


def test_a_dead_host_is_told_once_and_tried_less_and_less_often(
    run: Callable[..., JobOutcome], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run({"worker-1": [None], "worker-2": [*[GONE] * (TRIES - 1), None]}, tries=TRIES) == DONE
    assert capfd.readouterr().err.count("worker-2 can't be reached; the others go on") == 1
    apart = [after - before for before, after in itertools.pairwise(Reached.tries["worker-2"])]
    assert len(apart) == TRIES - 1
    # Twice as long each time, and no longer than the longest.
    assert all(waited >= wanted for waited, wanted in zip(apart, (0.1, 0.2, 0.4, 0.4), strict=True))
    assert Reached.waits[-1] == 0.4


def test_a_host_that_is_lost_again_after_it_came_back_is_told_again(
    run: Callable[..., JobOutcome], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run({"worker-1": [None], "worker-2": [LOST, LOST, None]}, tries=3) == DONE
    assert capfd.readouterr().err.count("worker-2 was lost in the middle of the job; the others go on") == 2


def test_a_host_that_is_told_to_stop_leaves_the_others_and_is_tried_again_late(
    run: Callable[..., JobOutcome], capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = JobOutcome(exit_code=143, message="stopped by signal 15")
    assert run({"worker-1": [None], "worker-2": [stopped, None]}, tries=2) == DONE
    said = capfd.readouterr().err
    assert said == "samestep: worker-2: stopped by signal 15; the others go on, and it is tried again\n"
    first, second = Reached.tries["worker-2"]
    assert second - first >= 0.4


def test_a_host_that_is_told_to_stop_once_more_after_it_has_worked_is_told_again(
    run: Callable[..., JobOutcome], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = JobOutcome(exit_code=143, message="stopped by signal 15")
    began = Reached.__init__

    def long_ago(self: Reached, *given: Any) -> None:
        began(self, *given)
        self.began -= 60.0

    monkeypatch.setattr(Reached, "__init__", long_ago)
    assert run({"worker-1": [None], "worker-2": [stopped, stopped, None]}, tries=3) == DONE
    assert capfd.readouterr().err.count("worker-2: stopped by signal 15; the others go on") == 2


def test_a_host_that_is_still_being_reached_is_none_that_goes_on(run: Callable[..., JobOutcome]) -> None:
    stopped = JobOutcome(exit_code=143, message="stopped by signal 15")
    assert run({"worker-1": [REACHING], "worker-2": [stopped]}, tries=TRIES).exit_code == 143


@pytest.mark.parametrize("exit_code", [1, 2])
def test_a_host_that_comes_back_unready_ends_nobodys_job(
    run: Callable[..., JobOutcome], capfd: pytest.CaptureFixture[str], exit_code: int
) -> None:
    unready = JobOutcome(exit_code=exit_code, message="worker-2: the folder /shared: No such file or directory")
    assert run({"worker-1": [None], "worker-2": [LOST, unready, unready, unready, None]}, tries=5) == DONE
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "samestep: worker-2 was lost in the middle of the job; the others go on, and it is tried again",
        f"samestep: {unready.message}; the others go on, and it is tried again",
    ]
    apart = [after - before for before, after in itertools.pairwise(Reached.tries["worker-2"])]
    assert all(waited >= wanted for waited, wanted in zip(apart, (0.1, 0.1, 0.2, 0.4), strict=True))


def test_a_mistake_at_the_start_ends_the_job_on_all_hosts(run: Callable[..., JobOutcome]) -> None:
    mistake = JobOutcome(exit_code=2, message="worker-2: no script train.py")
    assert run({"worker-1": [None], "worker-2": [mistake]}, tries=TRIES) == mistake
    assert [each.orders for each in Reached.working] == [["signal 15"]]


def test_the_last_host_that_gives_up_ends_the_job(run: Callable[..., JobOutcome]) -> None:
    cut_off = JobOutcome(exit_code=1, message="worker-2: the job's store can't be reached")
    assert run({"worker-2": [cut_off]}, tries=TRIES) == cut_off


@pytest.mark.parametrize(
    "says", [JobOutcome(exit_code=1, message="cut off"), JobOutcome(exit_code=143, message="stopped"), LOST]
)
def test_behind_one_process_too_the_others_do_the_job(run: Callable[..., JobOutcome], says: Says) -> None:
    assert run({"worker-1": [None], "worker-2": [says], "worker-3": [None]}, together=True) == DONE


def test_behind_one_process_too_the_host_that_was_lost_is_named(run: Callable[..., JobOutcome]) -> None:
    lost_it = Failure(host="worker-1", rank=0, exit_code=1, reason="closed", log="x", at=0.0, follows=True)
    follows = JobOutcome(exit_code=1, message="rank 0 on worker-1 failed first", failure=lost_it)
    cut_off = JobOutcome(exit_code=1, message="cut off")
    found = run({"worker-1": [follows], "worker-2": [LOST], "worker-3": [cut_off]}, together=True)
    assert (found.exit_code, found.message) == (1, "worker-2 was lost in the middle of the job")


LOST_A_PEER = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss.backward()
RuntimeError: Got the following error when running the callback: DistBackendError: Connection closed by peer
At:
  /samestep/work.py(39): finish
  /lib/threading.py(982): run
"""
OF_ITS_OWN = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    read(sample)
  File "data.py", line 4, in read
    raise ValueError("Connection closed by peer")
ValueError: the sample has no label
"""


@pytest.mark.parametrize(("of_rank_0", "cause"), [(LOST_A_PEER, 1), (OF_ITS_OWN, 0)])
def test_a_rank_that_lost_another_is_no_root_cause_though_it_failed_first(
    of_rank_0: str, cause: int, tmp_path: Path
) -> None:
    failures: dict[int, ProcessFailure] = {}
    for rank, reason in enumerate((of_rank_0, OF_ITS_OWN)):
        file = tmp_path / f"{rank}.json"
        told = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": str(100 + rank)}}
        file.write_text(json.dumps({"message": told}), encoding="utf-8")
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file))
    found = first_of(failures, "host-a", tmp_path)
    assert (found.rank, found.follows) == (cause, False)
