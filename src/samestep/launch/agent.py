"""Agent: one host's part of a job, by PyTorch's elastic agent. It starts the host's ranks and sees them end.

Sequence on one host: `Handshake` (all hosts have come and agree) -> `elastic_agent.run` (rendezvous, start ranks,
look after them, start them again) -> an `Outcome`, told to the controller. A thread looks twice a second whether the
job has ended elsewhere (`_look`), and ends this host's ranks by SIGTERM to this process, then by SIGKILL after 5 s.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from samestep import environment
from samestep.errors import HostLostError, JobOverError, StartError, UserError
from samestep.launch import elastic_agent, rendezvous
from samestep.launch.device import accelerators, check_slots
from samestep.launch.failure import Failure, Outcome, first_of, of_failures, of_hang
from samestep.launch.handshake import Handshake
from samestep.launch.logs import Follower, RankFiles
from samestep.launch.node_spec import NodeSpec
from samestep.launch.rank_entry import check_command
from samestep.launch.rounds import RanksEnded
from samestep.launch.worker import entry_of, rank_command

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN = 0.5  # seconds; a signal to the process group and one to this process are the same one
_LOOK = 0.5  # seconds between two looks at whether the job has ended elsewhere
_AFTER_END = 5.0  # seconds that ranks have to end when the job has failed elsewhere
_SETTLE = 3.0  # seconds for all hosts to tell their failures


def run(part: NodeSpec) -> Outcome:
    """Take this host's part in a job, from the first meeting of the hosts to the end of its ranks.

    No process is left running, whatever happens. Mistakes and failures are in what it returns.
    """
    with _Signals() as signals, elastic_agent.silent_agent():
        agent = _Agent(part, signals)
        try:
            outcome = agent.take_part()
            signals.only_note()  # what is left takes seconds, and ends by itself
        except SignalException:
            outcome = agent.interrupted()
        return agent.leave(outcome)


class _Agent:
    """This host's part, and what the hosts tell each other of it."""

    def __init__(self, part: NodeSpec, signals: "_Signals") -> None:
        self._part = part
        self._signals = signals
        self._handshake: Handshake | None = None  # None: before it, and on a host that is alone

    def take_part(self) -> Outcome:
        """Raises SignalException where a signal ends it."""
        part = self._part
        try:
            program = _program(part)  # a script that isn't there is found before anybody waits
            if part.address is not None:
                self._handshake = Handshake(part)
                self._handshake.agree()
            outcome = _Ranks(part, program, self._signals, self._handshake).run()
            if outcome.exit_code == 0 and self._handshake is not None:
                self._handshake.tell_success()
            return outcome
        except JobOverError as error:
            # A host that was lost may come back when the others are done.
            well = self._handshake is not None and self._handshake.succeeded(_SETTLE)
            return Outcome() if well else Outcome(exit_code=1, message=str(error))
        except UserError as error:
            return Outcome(exit_code=2, message=str(error))
        except (StartError, HostLostError) as error:
            return Outcome(exit_code=1, message=str(error))

    def interrupted(self) -> Outcome:
        """What is told after a signal."""
        number = self._signals.number
        if self._handshake is not None and not self._part.elastic:
            self._handshake.end(f"{self._part.host} was told to stop by {signal.Signals(number).name}")
        return Outcome(exit_code=128 + number, message=f"stopped by signal {number}")

    def leave(self, outcome: Outcome) -> Outcome:
        """The last that is heard of the other hosts, and what is then known of the end."""
        if self._handshake is None:
            return outcome
        if outcome.exit_code != 0 and not self._part.controlled and self._part.most > 1:
            outcome = _over_all_hosts(outcome, self._handshake)
        self._handshake.leave(_SETTLE)
        return outcome


def _over_all_hosts(outcome: Outcome, handshake: Handshake) -> Outcome:
    """What one host knows of the end, after what the others tell."""
    if outcome.failure is not None:
        time.sleep(_SETTLE / 2)
    told = handshake.failures()
    # The host whose rank failed first ends the job, and then tells why.
    until = time.monotonic() + _SETTLE
    while outcome.failure is None and told == [] and time.monotonic() < until:
        time.sleep(0.1)
        told = handshake.failures()
    return of_failures([*(told or ()), *([outcome.failure] if outcome.failure is not None else ())]) or outcome


def _program(part: NodeSpec) -> list[str]:
    """The command line of a rank, checked: that it can be run, and that the host has the slots."""
    check_command(part.command, part.host)
    check_slots(part.host, part.num_procs, part.chosen, part.device)
    return rank_command(
        part.command, engine=part.engine, bind=part.bind, threads=part.threads, local_ranks=part.num_procs
    )


class _Ranks:
    """The ranks of this host, in as many rounds as it takes."""

    def __init__(
        self, part: NodeSpec, program: Sequence[str], signals: "_Signals", handshake: Handshake | None
    ) -> None:
        self._part = part
        self._program = program
        self._signals = signals
        self._handshake = handshake
        self._over = threading.Event()
        self._ended: str | None = None  # why, where the job ended elsewhere

    def run(self) -> Outcome:
        """The host's part from its first rank to its last: how it ended, with the reason where a rank failed."""
        part = self._part
        with ExitStack() as stack:
            follower = stack.enter_context(Follower()) if part.output == "terminal" else None
            files = RankFiles(Path(part.logs) if part.logs is not None else None, part.host, follower)
            stack.enter_context(environment.agent_settings())
            stack.enter_context(environment.given(self._variables()))
            stack.enter_context(self._watch())
            try:
                self._start(files)
            except ChildFailedError as error:
                return self._failed(partial(first_of, error.failures, part.host, files.here))
            except elastic_agent.HungError as error:
                return self._failed(partial(of_hang, error.hang, part.host, files.here))
            except SignalException:
                if self._ended is None:
                    raise
                return Outcome(exit_code=1, message=self._ended)
        return Outcome()

    def _start(self, files: RankFiles) -> None:
        """Meet the other hosts and run the ranks, with restarts; returns when all ranks are done."""
        part = self._part

        def explain(failures: Mapping[int, ProcessFailure]) -> RanksEnded:
            failure = first_of(failures, part.host, files.here)
            told = failure.reason.startswith("Traceback")
            reason = failure.reason if told else f"{failure.how}\n{failure.reason}"
            return RanksEnded(rank=failure.rank, reason=reason, at=failure.at, follows=failure.follows)

        entry = entry_of(self._program)  # a server of ranks imports while the hosts meet
        elastic_agent.run(
            elastic_agent.AgentSpec(
                hosts=self._rendezvous(),
                num_procs=part.num_procs,
                entry=entry,
                files=files,
                explain=explain,
                max_restarts=part.max_restarts,
                grace_period=part.grace_period,
                run=part.run,
            )
        )

    def _rendezvous(self) -> rendezvous.NodeRendezvous:
        """Where and how this host's elastic agent meets the others', where there are any."""
        part = self._part
        if self._handshake is None:
            return rendezvous.SingleNodeRendezvous(part.job, part.host)
        return rendezvous.MultiNodeRendezvous(
            RendezvousParameters(
                backend=rendezvous.BACKEND,
                endpoint=f"{self._handshake.address}:{part.port}",
                run_id=part.job,
                min_nodes=part.fewest,
                max_nodes=part.most,
                node_rank=part.node_rank,
                name=part.host,
                limits=part.limits,
            )
        )

    def _variables(self) -> dict[str, str]:
        """Which accelerators the ranks see."""
        chosen = self._part.chosen
        if self._part.device == "cpu":
            return environment.no_devices()
        # Without accelerators, what was chosen are slots, which are all the same.
        return environment.devices(chosen) if chosen is not None and accelerators() else {}

    def _failed(self, find: Callable[[], Failure]) -> Outcome:
        """Tell the other hosts of the failure, hear theirs, and pick the first."""
        self._over.set()  # that the job has ended is then no news from elsewhere, also while the files are read
        failure = find()
        if self._handshake is not None:
            self._handshake.tell_failure(failure)
        outcome = of_failures([failure])
        assert outcome is not None
        return outcome

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """End this host's ranks when the job has ended elsewhere: they may wait for ranks that are gone."""
        if self._handshake is None:
            yield
            return
        thread = threading.Thread(target=self._look, args=(self._handshake,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_LOOK)  # it may wait for a store that is silent

    def _look(self, handshake: Handshake) -> None:
        """The thread that sees the job end elsewhere: then this host's ranks end as well."""
        while not self._over.wait(_LOOK):
            try:
                handshake.tell_time()
                self._ended = handshake.ended()
            except StartError:
                return  # whether the job can go on without its store is not decided here
            if self._ended is not None and not self._over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._over.wait(_AFTER_END):
                    end_children()
                return


class _Signals:
    """The first signal ends the ranks in good order, the second one at once."""

    def __init__(self) -> None:
        self.number = 0
        self._ends = True
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def only_note(self) -> None:
        """The ranks have ended; a signal that comes from now on finds nothing to end."""
        self._ends = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """The first signal ends the ranks in peace, a second one half a second or more later kills them."""
        now = time.monotonic()
        if self.number == 0:
            self.number, self._at = number, now
            if self._ends:
                raise SignalException(f"signal {number}", signal.Signals(number))
        if now - self._at > _AGAIN:
            end_children()


def end_children() -> None:
    """Kill this process's children, each with the process group that it leads, and the ranks that it had forked."""
    for child in multiprocessing.active_children():
        child.kill()  # the fork server is its parent, and its group is this process's
    for child in psutil.Process().children():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
