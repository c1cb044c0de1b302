"""NodeElasticAgent: PyTorch's elastic agent on each host of a job, where hosts detect each other's failures.

What it adds: ranks that wait for a host that is gone are ended without waiting for their own time limits; where a
host joins, ranks get notice and save before all start again; all hosts count the same restarts.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousGracefulExitError

from samestep import environment, private_folders
from samestep.errors import USERS_MISTAKE, JobOverError, StartError
from samestep.fault_tolerance.preemption import Signals
from samestep.fault_tolerance.scratch import folder_in_memory, scratch
from samestep.fault_tolerance.status import JobInfo
from samestep.fault_tolerance.watchdog import Handle, Hang
from samestep.launch import compiler_cache, endings, fork_server
from samestep.launch.failure import find_told, has_error_file, note
from samestep.launch.logs import RankFiles, say
from samestep.launch.node_heartbeat import RoundEndReason
from samestep.launch.options import RankOptions
from samestep.launch.rendezvous import BROKEN, NodeRendezvous
from samestep.launch.rounds import NodeRounds, RanksEnded
from samestep.launch.worker import RankEntry
from samestep.progress import phases
from samestep.run_folder import RunPlace, rank_file
from samestep.torch_internals.elastic import ElasticAgent

# Explains why this host's ranks ended, from their error files and logs.
Explain = Callable[[Mapping[int, ProcessFailure]], RanksEnded]

_APART = 0.1  # seconds between monitoring steps
_LOST_STATUS = 255  # multiprocessing's exit code of a process whose fork server has ended
_LINGER = 3.0  # seconds that the host with a round's store waits for other hosts to leave
_A_WORD = 3.0  # seconds within which a host announces that it stops its ranks


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Hooks of a process that runs a training itself rather than a command."""

    known: Callable[[], JobInfo] | None = None  # the job's facts before its ranks publish them
    signals: Signals | None = None  # handlers that let the ranks save
    # Prepares the next round for fewer ranks and returns their number; None if impossible.
    shrink: Callable[[], int | None] = lambda: None

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the job."""
        return self.signals is not None and self.signals.number is not None


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Configuration of a host's elastic agent."""

    hosts: NodeRendezvous
    num_procs: int  # ranks of this host
    entry: RankEntry
    files: RankFiles
    explain: Explain
    max_restarts: int = 0
    grace_period: float = RankOptions.grace_period  # seconds for the ranks to end after SIGTERM
    signals: str = ""  # names of signals that PyTorch's agent handles
    run: RunPlace | None = None  # of a samestep job, whose folder then holds the ranks' logs
    supervision: Supervision = field(default_factory=Supervision)


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What a host tells the others of a round before its ranks start."""

    ranks: Annotated[int, Ge(1), Le(1 << 16)]
    restarts: Annotated[int, Ge(0), Le(1 << 40)]  # that are left


def _part_key(rank: int) -> str:
    """The key in a round's store under which a host tells that."""
    return f"samestep/part/{rank}"


def _leave_key(rank: int) -> str:
    """The key in a round's store under which a host tells that it leaves."""
    return f"samestep/leave/{rank}"


@contextmanager
def silent_agent() -> Iterator[None]:
    """Silence the elastic agent's log of each failure; samestep reports the root cause once."""
    # Its modules' loggers have their own levels.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [
        logging.getLogger(name) for name in (*names, "torch.distributed.elastic", "torch.multiprocessing.spawn")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class HungError(Exception):
    """A rank of this host hung, and restarts are used up."""

    def __init__(self, hang: Hang) -> None:
        super().__init__(hang.reason)
        self.hang = hang


class NodeElasticAgent(ElasticAgent):
    """The agent of one host among several, or alone.

    A round, from the point of view of one host:

        rendezvous     meet the other hosts; all agree on who is in the round and on the restarts that are left
        start_ranks    one process a rank; the watchdog gets handles on them
        monitor        every 0.1 s: have ranks ended, is a host lost, does one want to join?
        ended          all ranks succeeded -> wait for the other hosts and finish
                       a rank failed -> post why, spend a restart, the next round
                       a host was lost, or wants to join -> stop the ranks, the next round, no restart spent here

    Ranks that wait in a collective for a rank that is gone never return by themselves for minutes: each host's agent
    kills its own ranks as soon as it hears of the end of the round.
    """

    def __init__(self, spec: AgentSpec, place: Path, memory: Path) -> None:
        """`place` and `memory` are scratch folders of this host, the second in memory, removed with the agent."""
        super().__init__(
            spec=WorkerSpec(
                role="default",
                local_world_size=spec.num_procs,
                entrypoint=spec.entry.entrypoint,
                rdzv_handler=spec.hosts,
                max_restarts=spec.max_restarts,
                monitor_interval=_APART,
            ),
            logs_specs=spec.files,
            start_method=fork_server.METHOD,
            shutdown_timeout=round(spec.grace_period),
        )
        self._spec = spec
        self._hosts = spec.hosts
        self._supervision = spec.supervision
        self._rounds = NodeRounds(
            spec.hosts, place, memory, spec.run, job_info=spec.supervision.known, signals=spec.supervision.signals
        )
        self._memory = memory
        self._why: RanksEnded | None = None
        self._mistaken = False  # whether the failure was a user's mistake
        self._ranks: Mapping[int, Handle] = {}  # the ranks started last, by their numbers
        self._over: Collection[int] = ()  # those that had ended before this agent looked after the others
        self._kills = endings.OutOfMemoryKills()
        self._at_once = False  # whether to kill the ranks without letting them save

    @property
    def _size(self) -> str:
        """The number of ranks in words, of all hosts once they have met."""
        size = max((worker.world_size for worker in self.group.workers), default=0)
        size = size if size > 0 else self._spec.num_procs
        return "1 rank" if size == 1 else f"{size} ranks"

    def status(self) -> str:
        """What the job does, in words."""
        step = self._rounds.step
        return f"running {self._size}" + ("" if step is None else f", in step {step + 1:,}")

    def close(self) -> None:
        """Close the rounds, after the last one."""
        self._rounds.end(self._why)
        self._rounds.close(failed=self._why is not None and not self._mistaken)

    @property
    def hang(self) -> Hang | None:
        """The hang of this host's rank that ended the last round, if one did."""
        return self._rounds.hang

    def rendezvous(self, group: WorkerGroup) -> None:
        """Rendezvous until a round has begun with all its hosts present."""
        self._rounds.end(self._why)
        self._why, self._at_once = None, False
        with phases.status(lambda: "waiting for hosts"):
            while True:
                try:
                    super().rendezvous(group)
                    self._rounds.agree()
                    break
                except BROKEN:  # a host was lost during the rendezvous
                    continue
        if self._rounds.run_folder is not None:
            self._spec.files.of_run(self._rounds.run_folder)
        self._rounds.begin([worker.global_rank for worker in group.workers])

    def number_ranks(self, store: object, host: int, hosts: int, spec: WorkerSpec) -> list[Worker]:
        """Number this host's ranks after those of the hosts before it, and agree on the restarts that are left.

        What PyTorch's agent reads for this in the round's store is not signed. Of the restarts the minimum over the
        hosts is left, since a late host has used none.
        """
        round_ = self._hosts.round
        assert round_ is not None
        part = HostPart(ranks=spec.local_world_size, restarts=self.restarts_left)
        round_.store.write(_part_key(host), part)
        parts = round_.store.wait_all([_part_key(rank) for rank in range(hosts)], HostPart)
        self.restarts_left = min(part.restarts for part in parts)
        first, size = sum(part.ranks for part in parts[:host]), sum(part.ranks for part in parts)
        return [
            Worker(
                local_rank=number,
                global_rank=first + number,
                role_rank=first + number,
                world_size=size,
                role_world_size=size,
            )
            for number in range(spec.local_world_size)
        ]

    def start_ranks(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, and open pidfd handles on them, which are safe from reused ids."""
        group.spec.args = self._spec.entry.arguments()
        self._kills = endings.OutOfMemoryKills()
        try:
            started = super().start_ranks(group)
        except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise StartError(endings.why_not_started(error)) from error
        numbers = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._ranks = {numbers[local_rank]: Handle(pid) for local_rank, pid in started.items()}
        self._rounds.started({rank: handle.pid for rank, handle in self._ranks.items()})
        number = self._rounds.number
        phases.say(f"{self._size} started" + (f" again, for round {number}" if number else ""))
        return started

    def monitor(self, group: WorkerGroup) -> RunResult:
        """Check the ranks and the other hosts; PyTorch's agent calls this repeatedly."""
        self._over = [rank for rank, handle in self._ranks.items() if not handle.alive()]
        result = super().monitor(group)
        if result.state is WorkerState.HEALTHY and (early := self._ended_early()):
            result = RunResult(state=WorkerState.FAILED, failures=early)
        self._rounds.look()
        lost = self._hosts.lost()
        if result.state is WorkerState.SUCCEEDED:
            return self._when_all_are_done(result)
        if result.state is WorkerState.FAILED:
            return self._failed(result)
        if result.state is WorkerState.HEALTHY and lost is not None:
            self._leave_for(lost)
        return result

    def _leave_for(self, lost: RoundEndReason) -> None:
        """End the round because of a lost host: request a new one from the elastic agent, which asks for it next."""
        if lost.what != "round" or lost.state == "failed":
            if lost.what != "round":
                say(f"{self._hosts.name}: {lost}; its ranks end")
            self._at_once = True
        self._hosts.ask_for_round()

    def _failed(self, result: RunResult) -> RunResult:
        """Handle failed ranks of this host: decide whether the job goes on, and with how many ranks.

        A user's mistake (exit code 2) would be made again, so no restart is left then. Ranks that ended by SIGTERM
        while another host asks for a round have not failed.
        """
        result = RunResult(state=result.state, failures={**result.failures, **self._failed_too(result.failures)})
        codes = {failure.exitcode for failure in result.failures.values()}
        stopped = {-signal.SIGTERM, 128 + signal.SIGTERM}
        if codes <= stopped and self._others_change():
            # All ranks have saved after the same step, because another host stops them for one that joins.
            self._hosts.ask_for_round()
            return RunResult(state=WorkerState.HEALTHY)
        self._note_ends(result.failures)
        self._why = self._spec.explain(result.failures)
        if self._why.follows and (early := self._ended_well(result.failures)):
            # A connection is lost, and whose end lost it is known.
            result = RunResult(state=result.state, failures={**result.failures, **early})
            self._why = self._spec.explain(result.failures)
        self._hosts.heartbeat.leave("failed")
        self._mistaken = USERS_MISTAKE in codes
        if self._mistaken or self._supervision.stopped:
            self.restarts_left = 0  # a mistake would be made again
        elif self._is_lost_for_good() and (fewer := self._supervision.shrink()) is not None:
            spec = self.group.spec
            spec.local_world_size, self.restarts_left = fewer, spec.max_restarts + 1
        return result

    def _is_lost_for_good(self) -> bool:
        """Whether a failed rank seems lost for good: restarts are used up, or the last one took no step."""
        return self.restarts_left == 0 or (self._rounds.number > 0 and not self._rounds.took_a_step)

    def _failed_too(self, told: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Find further failed ranks: for forked ranks PyTorch reports only one, even if several have ended."""
        if (processes := self.forked()) is None:
            return {}
        failures = {}
        for worker in self.group.workers:
            process = processes[worker.local_rank]
            if process.exitcode and worker.global_rank not in told:
                failures[worker.global_rank] = ProcessFailure(
                    local_rank=worker.local_rank,
                    pid=process.pid,
                    exitcode=process.exitcode,
                    error_file=self.context.error_files[worker.local_rank],
                )
        return failures

    def _ended_early(self) -> dict[int, ProcessFailure]:
        """Find ranks that run a function and have ended with exit code 0 before it has returned."""
        if (processes := self.forked()) is None:
            return {}
        return {
            worker.global_rank: self._early(worker.global_rank, worker.local_rank)
            for worker in self.group.workers
            if processes[worker.local_rank].exitcode == 0 and not self.has_returned(worker.local_rank)
        }

    def _ended_well(self, failed: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Find ranks that had ended with exit code 0 when another one lost its connection."""
        context = self.context
        if not isinstance(context, SubprocessContext):
            return self._ended_early()
        return {
            worker.global_rank: self._early(worker.global_rank, worker.local_rank)
            for worker in self.group.workers
            if worker.global_rank in self._over
            and worker.global_rank not in failed
            and context.subprocess_handlers[worker.local_rank].proc.poll() == 0
        }

    def _early(self, rank: int, local_rank: int) -> ProcessFailure:
        """Build the failure of a rank that has ended with exit code 0 too early."""
        error_file = "" if self.context is None else self.context.error_files[local_rank]
        failure = ProcessFailure(local_rank=local_rank, pid=self._ranks[rank].pid, exitcode=0, error_file=error_file)
        note(
            failure,
            "its process ended with exit code 0 while the other ranks still needed it, as by sys.exit() or "
            "os._exit() in its code",
        )
        return failure

    def _note_ends(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Note in failures how the processes ended, as far as this agent knows."""
        server = endings.server_end()
        first = [rank for rank in failures if rank in self._over] or list(failures)
        for rank, failure in failures.items():
            if failure.exitcode > 0 and not has_error_file(failure):
                find_told(failure, rank_file(self._memory, rank, "error.json"))
            if (kill := self._rounds.kills.get(rank)) is not None and failure.exitcode == -signal.SIGKILL:
                note(failure, kill.reason, follows=kill.follows)
            elif failure.exitcode == _LOST_STATUS and server is not None and not has_error_file(failure):
                note(failure, f"{server}, and the ranks with it")
            elif failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL) and rank not in first:
                note(failure, f"samestep ended it, after rank {first[0]} had failed", follows=True)
            elif failure.exitcode < 0:
                killed = self._kills.has_killed(failure.pid)
                note(failure, f"its process was {endings.ended_by(-failure.exitcode, out_of_memory=killed)}")

    def _others_change(self) -> bool:
        """Whether another host leaves the round or requests a new one within 3 s."""
        until = time.monotonic() + _A_WORD
        while self._hosts.peers() and time.monotonic() < until:
            lost = self._hosts.lost()
            if self._hosts.num_nodes_waiting() > 0 or lost is not None:
                return True
            time.sleep(_APART)
        return False

    def _when_all_are_done(self, result: RunResult) -> RunResult:
        """Wait until all hosts' ranks are done: if a host is lost before, the round must be repeated."""
        self._hosts.heartbeat.done()
        while not self._hosts.heartbeat.all_done:
            lost = self._hosts.lost()
            if lost is not None and lost.what == "store":
                break  # this host is done, and there is no store to wait on
            if lost is not None:
                self._leave_for(lost)
                return RunResult(state=WorkerState.HEALTHY)
            time.sleep(_APART)
        return result

    def leave_round(self) -> None:
        """Leave the round; the host with its store waits for the others. All ranks are known to be done."""
        round_, rank = self._hosts.round, self.group.group_rank
        with suppress(*BROKEN):
            assert round_ is not None
            round_.store.write(_leave_key(rank), True)
            others = [_leave_key(number) for number in range(len(round_.members))]
            until = time.monotonic() + _LINGER
            while round_.first and not all(round_.store.read_all_own(others, bool)):
                if time.monotonic() > until:
                    break
                time.sleep(_APART)

    def stop_ranks(self, group: WorkerGroup) -> None:
        """End this host's ranks: with time to save if only the set of hosts changes, else at once."""
        if not self._at_once and self._why is None:
            self._hosts.heartbeat.leave("changes")
            self._let_stop()
        elif self._why is None:
            self._hosts.heartbeat.leave("failed")
        for rank in self._ranks.values():
            rank.kill()
            rank.close()
        self._ranks = {}
        super().stop_ranks(group)

    def _let_stop(self) -> None:
        """Send SIGTERM to the ranks and wait for them to save; samestep's own end after a common step."""
        for rank in self._ranks.values():
            if rank.alive():
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)
        until = time.monotonic() + (self._rounds.grace_period or self.grace_period)
        while time.monotonic() < until and any(rank.alive() for rank in self._ranks.values()):
            lost = self._hosts.lost()
            if lost is not None and (lost.what != "round" or lost.state == "failed"):
                break
            time.sleep(_APART)

    def shut_down(self, death_signal: signal.Signals, timeout: int) -> None:
        """Shut down this agent: end its ranks by SIGTERM, and by SIGKILL after the grace period."""
        # Always SIGTERM: ranks whose starter forwards signals ignore SIGINT, which a terminal sends to all.
        del death_signal
        if not self._at_once and self._why is None:
            self._hosts.heartbeat.leave("changes")
        if not self._spec.entry.takes_notice:
            for rank in self._ranks.values():
                rank.kill()
        super().shut_down(signal.SIGTERM, min(timeout, self.grace_period))


def run(spec: AgentSpec) -> dict[int, Any]:
    """Do one host's part of a job, and return what the ranks of a function returned.

    Raises ChildFailedError or HungError where ranks failed and restarts are used up, SignalException where a signal
    ended this host's part, HostLostError where the job can't go on here.
    """
    leaves_alone = False
    private_folders.is_kept(environment.cache_folder())  # told here, since the ranks stay silent
    with (
        environment.agent_signals(spec.signals),
        compiler_cache.private(),
        scratch("samestep-agent-") as place,
        folder_in_memory() as memory,
    ):
        agent = NodeElasticAgent(spec, place, memory)
        try:
            with phases.status(agent.status, others=True):
                result = agent.run()
        except SignalException:
            leaves_alone = True  # the other hosts go on if they can
            raise
        except RendezvousClosedError:
            raise JobOverError(f"{spec.hosts.get_run_id()}: the job is over; another host has ended it") from None
        except RendezvousGracefulExitError:
            return {}
        finally:
            agent.close()
            if leaves_alone:
                spec.hosts.leave()
            else:
                spec.hosts.shutdown()
    if result is None:
        return {}
    if result.is_failed() and agent.hang is not None:
        raise HungError(agent.hang)
    if result.is_failed():
        raise ChildFailedError(name=str(spec.entry.entrypoint), failures=result.failures)
    return result.return_values
