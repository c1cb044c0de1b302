"""Agent: one host's part of a job, by PyTorch's elastic agent. It starts the host's ranks and monitors them.

Sequence on one host: `Handshake` (all hosts have joined and agree) -> `elastic_agent.run` (rendezvous, start ranks,
monitor and restart them) -> a `JobOutcome`, sent to the controller. A thread checks twice a second whether the job
has ended elsewhere (`_look`), and ends this host's ranks by SIGTERM to this process, then by SIGKILL after 5 s.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from samestep import environment
from samestep.errors import HostLostError, JobOverError, StartError, UserError
from samestep.fault_tolerance.signals import ENDING, TwoSignals
from samestep.launch import elastic_agent, rendezvous
from samestep.launch.device import accelerators, check_slots
from samestep.launch.failure import Failure, JobOutcome, first_of, of_failures, of_hang
from samestep.launch.handshake import Handshake
from samestep.launch.job_secret import JobSecret
from samestep.launch.logs import Follower, RankFiles
from samestep.launch.node_spec import NodeSpec
from samestep.launch.rank_entry import check_command
from samestep.launch.rounds import RanksEnded
from samestep.launch.worker import entry_of, rank_command
from samestep.progress import phases

_LOOK = 0.5  # seconds between two looks at whether the job has ended elsewhere
_AFTER_END = 5.0  # seconds that ranks have to end when the job has failed elsewhere
_SETTLE = 3.0  # seconds for all hosts to tell their failures


def run(spec: NodeSpec, secret: JobSecret | None = None) -> JobOutcome:
    """Run this host's part of a job, from the handshake to the end of its ranks. `secret`: of the job's hosts.

    No process is left running. User mistakes and failures are in the returned JobOutcome.
    """
    with stop_signals() as signals, elastic_agent.silent_agent():
        agent = _Agent(spec, signals, secret)
        try:
            outcome = agent.take_part()
            signals.only_note()  # what remains takes seconds, and always ends
        except SignalException:
            outcome = agent.interrupted()
        return agent.leave(outcome)


class _Agent:
    """This host's part of a job, and its handshake with the other hosts."""

    def __init__(self, spec: NodeSpec, signals: TwoSignals, secret: JobSecret | None) -> None:
        self._spec = spec
        self._secret = secret
        self._signals = signals
        self._handshake: Handshake | None = None  # None before the handshake, and in a single-host job

    def take_part(self) -> JobOutcome:
        """Shake hands with the other hosts, then run the ranks. Raises SignalException on a signal."""
        spec = self._spec
        try:
            program = _program(spec)  # find a missing script before any host waits
            if spec.address is not None:
                self._handshake = Handshake(spec, self._secret)
                self._handshake.agree()
            # Each host tells of its own wait, and one of them of the job.
            with phases.muted() if spec.node_rank else nullcontext():
                outcome = _Ranks(spec, program, self._signals, self._handshake, self._secret).run()
            if outcome.exit_code == 0 and self._handshake is not None:
                self._handshake.tell_success()
            return outcome
        except JobOverError as error:
            # A host that was lost may come back after the others have finished.
            well = self._handshake is not None and self._handshake.succeeded(_SETTLE)
            return JobOutcome() if well else JobOutcome(exit_code=1, message=str(error))
        except UserError as error:
            return JobOutcome(exit_code=2, message=str(error))
        except (StartError, HostLostError) as error:
            return JobOutcome(exit_code=1, message=str(error))

    def interrupted(self) -> JobOutcome:
        """Return the outcome after a signal, and end a non-elastic job on all hosts."""
        number = self._signals.number or 0
        if self._handshake is not None and not self._spec.elastic:
            self._handshake.end(f"{self._spec.host} was told to stop by {signal.Signals(number).name}")
        return JobOutcome(exit_code=128 + number, message=f"stopped by signal {number}")

    def leave(self, outcome: JobOutcome) -> JobOutcome:
        """Collect the other hosts' failures, and leave the job's store."""
        if self._handshake is None:
            return outcome
        if outcome.exit_code != 0 and not self._spec.controlled and self._spec.most > 1:
            outcome = _over_all_hosts(outcome, self._handshake)
        self._handshake.leave(_SETTLE)
        return outcome


def _over_all_hosts(outcome: JobOutcome, handshake: Handshake) -> JobOutcome:
    """Combine this host's outcome with the failures that other hosts report."""
    if outcome.failure is not None:
        time.sleep(_SETTLE / 2)
    told = handshake.failures()
    # The host whose rank failed first ends the job, and reports the reason only then.
    until = time.monotonic() + _SETTLE
    while outcome.failure is None and told == [] and time.monotonic() < until:
        time.sleep(0.1)
        told = handshake.failures()
    return of_failures([*(told or ()), *([outcome.failure] if outcome.failure is not None else ())]) or outcome


def _program(spec: NodeSpec) -> list[str]:
    """Return the command line of a rank, after checking that it can run and that the host has the slots."""
    check_command(spec.command, spec.host)
    check_slots(spec.host, spec.num_procs, spec.chosen, spec.ranks.device)
    return rank_command(
        spec.command,
        engine=spec.ranks.engine,
        bind=spec.ranks.bind,
        threads=spec.ranks.threads,
        local_ranks=spec.num_procs,
    )


class _Ranks:
    """Runs this host's ranks, in one round or several."""

    def __init__(
        self,
        spec: NodeSpec,
        program: Sequence[str],
        signals: TwoSignals,
        handshake: Handshake | None,
        secret: JobSecret | None = None,
    ) -> None:
        self._spec = spec
        self._secret = secret
        self._program = program
        self._signals = signals
        self._handshake = handshake
        self._over = threading.Event()
        self._ended: str | None = None  # why the job ended on another host

    def run(self) -> JobOutcome:
        """Run the ranks of this host until the job ends, and return the outcome."""
        spec = self._spec
        with ExitStack() as stack:
            follower = stack.enter_context(Follower()) if spec.ranks.output == "terminal" else None
            files = RankFiles(Path(spec.logs) if spec.logs is not None else None, spec.host, follower)
            stack.enter_context(environment.agent_settings())
            stack.enter_context(environment.given(self._variables()))
            stack.enter_context(self._watch())
            try:
                self._start(files)
            except ChildFailedError as error:
                return self._failed(partial(first_of, error.failures, spec.host, files.here))
            except elastic_agent.HungError as error:
                return self._failed(partial(of_hang, error.hang, spec.host, files.here))
            except SignalException:
                if self._ended is None:
                    raise
                return JobOutcome(exit_code=1, message=self._ended)
        return JobOutcome()

    def _start(self, files: RankFiles) -> None:
        """Run the elastic agent: rendezvous, start ranks, restart them; returns when all ranks are done."""
        spec = self._spec

        def explain(failures: Mapping[int, ProcessFailure]) -> RanksEnded:
            failure = first_of(failures, spec.host, files.here)
            told = failure.reason.startswith("Traceback")
            reason = failure.reason if told else f"{failure.how}\n{failure.reason}"
            return RanksEnded(rank=failure.rank, reason=reason, at=failure.at, follows=failure.follows)

        entry = entry_of(self._program)  # the fork server imports during the rendezvous
        elastic_agent.run(
            elastic_agent.AgentSpec(
                hosts=self._rendezvous(),
                num_procs=spec.num_procs,
                entry=entry,
                files=files,
                explain=explain,
                max_restarts=spec.max_restarts,
                grace_period=spec.ranks.grace_period,
                run=spec.run,
            )
        )

    def _rendezvous(self) -> rendezvous.NodeRendezvous:
        """Return the rendezvous of this host's elastic agent, single-node or multi-node."""
        spec = self._spec
        if self._handshake is None:
            return rendezvous.SingleNodeRendezvous(spec.job, spec.host)
        return rendezvous.MultiNodeRendezvous(
            RendezvousParameters(
                backend=rendezvous.BACKEND,
                endpoint=f"{self._handshake.address}:{spec.port}",
                run_id=spec.job,
                min_nodes=spec.fewest,
                max_nodes=spec.most,
                node_rank=spec.node_rank,
                name=spec.host,
                timeouts=spec.timeouts,
            ),
            self._secret,
        )

    def _variables(self) -> dict[str, str]:
        """Return the variables that select the ranks' accelerators."""
        chosen = self._spec.chosen
        if self._spec.ranks.device == "cpu":
            return environment.no_devices()
        # Without accelerators the chosen slots are interchangeable.
        return environment.devices(chosen) if chosen is not None and accelerators() else {}

    def _failed(self, find: Callable[[], Failure]) -> JobOutcome:
        """Report a failure to the other hosts, and return the outcome."""
        self._over.set()  # ignore the end of the job from now on, while the logs are read
        failure = find()
        if self._handshake is not None:
            self._handshake.tell_failure(failure)
        outcome = of_failures([failure])
        assert outcome is not None
        return outcome

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Watch, in a thread, for the job's end on another host, and end this host's ranks then."""
        if self._handshake is None:
            yield
            return
        thread = threading.Thread(target=self._look, args=(self._handshake,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_LOOK)  # it may be blocked on the store

    def _look(self, handshake: Handshake) -> None:
        """Thread: polls the store for the job's end; then ends the ranks by SIGTERM, and kills them after 5 s."""
        while not self._over.wait(_LOOK):
            try:
                self._ended = handshake.ended()
            except StartError:
                return  # the elastic agent decides whether the job goes on without its store
            if self._ended is not None and not self._over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._over.wait(_AFTER_END):
                    end_children()
                return


def stop_signals() -> TwoSignals:
    """Signals of an agent: the first one ends the ranks gracefully, a second one kills them."""

    def stop(number: int) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    return TwoSignals(ENDING, first=stop, second=lambda _: end_children())


def end_children() -> None:
    """Kill this process's children with their process groups, and the forked ranks."""
    for child in multiprocessing.active_children():
        child.kill()  # child of the fork server, in this process's group
    for child in psutil.Process().children():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
