"""NodeElasticAgent: PyTorch's elastic agent on each host of a job, where hosts detect each other's failures.

What it adds: ranks that wait for a host that is gone are ended without waiting for their own time limits; where a
host joins, ranks get notice and save before all start again; all hosts count the same restarts.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, WorkerSpec

from samestep import environment
from samestep.errors import JobOverError
from samestep.fault_tolerance.scratch import folder_in_memory, scratch
from samestep.fault_tolerance.watchdog import Handle, Hang
from samestep.launch import fork_server
from samestep.launch.logs import RankFiles
from samestep.launch.node_heartbeat import Lost
from samestep.launch.rendezvous import BROKEN, MultiNodeRendezvous
from samestep.launch.rounds import NodeRounds, RanksEnded, say
from samestep.launch.worker import arguments_of, run_forked, warm_up
from samestep.run_folder import RunPlace

# Why this host's ranks ended, read from what they left.
Explain = Callable[[Mapping[int, ProcessFailure]], RanksEnded]

_APART = 0.1  # seconds between looks
_LINGER = 3.0  # seconds that the host with a round's store waits for the others to leave
_A_WORD = 3.0  # seconds in which a host that lets its ranks stop has told so
_USERS_MISTAKE = 2  # the exit code


# Its methods' decorators hide their types.
_ElasticAgent: Any = LocalElasticAgent


class HungError(Exception):
    """A rank of this host did not come, and restarts are used up."""

    def __init__(self, hang: Hang) -> None:
        super().__init__(hang.reason)
        self.hang = hang


class NodeElasticAgent(_ElasticAgent):
    """The agent of one host among several, or alone."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: LaunchConfig,
        *,
        explain: Explain,
        place: Path,
        memory: Path,
        run: RunPlace | None,
    ) -> None:
        assert isinstance(config.logs_specs, RankFiles)
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs,
            start_method=fork_server.METHOD,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout or 0,
        )
        assert isinstance(spec.rdzv_handler, MultiNodeRendezvous)
        self._hosts = spec.rdzv_handler
        self._files = config.logs_specs
        self._rounds = NodeRounds(self._hosts, place, memory, run)
        self._explain = explain
        self._why: RanksEnded | None = None
        self._ranks: Sequence[Handle] = ()  # that were started last
        self._at_once = False  # whether the ranks have nothing to save with those that are gone
        self._shutdown_within = config.shutdown_timeout or 0

    def close(self) -> None:
        """After the last round."""
        self._rounds.end(self._why)
        self._rounds.close(failed=self._why is not None)

    @property
    def hang(self) -> Hang | None:
        """What ended the last round, where it was a rank of this host that did not come."""
        return self._rounds.hang

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._rounds.end(self._why)
        self._why, self._at_once = None, False
        while True:
            try:
                super()._rendezvous(worker_group)
                self._count_alike(worker_group)
                self._rounds.agree()
                break
            except BROKEN:  # a host was lost after all had met
                continue
        if self._rounds.run_folder is not None:
            self._files.of_run(self._rounds.run_folder)
        self._rounds.begin([worker.global_rank for worker in worker_group.workers])

    def _count_alike(self, worker_group: WorkerGroup) -> None:
        """A host that came later has used up none of the job's restarts; the ranks' variables say how many are."""
        store: Any = worker_group.store
        size: Any = worker_group.group_world_size
        store.set(f"samestep/restarts/{worker_group.group_rank}", str(self._remaining_restarts))
        left = store.multi_get([f"samestep/restarts/{rank}" for rank in range(size)])
        self._remaining_restarts = min(int(each) for each in left)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        if spec.entrypoint is run_forked:
            spec.args = (spec.args[0], environment.snapshot())  # they tell the ranks their round
        started = super()._start_workers(worker_group)
        self._ranks = [Handle(pid) for pid in started.values()]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._rounds.look()
        lost = self._hosts.lost()
        if result.state is WorkerState.SUCCEEDED:
            return self._when_all_are_done(result)
        if result.state is WorkerState.FAILED:
            return self._failed(result)
        if result.state is WorkerState.HEALTHY and lost is not None:
            self._leave_for(lost)
        return result

    def _leave_for(self, lost: Lost) -> None:
        """Let the elastic agent begin another round. Called by its thread, which will ask for it next."""
        if lost.what != "round" or lost.state == "failed":
            if lost.what != "round":
                say(f"{self._hosts.name}: {lost}; its ranks end")
            self._at_once = True
        self._hosts.ask_for_round()

    def _failed(self, result: RunResult) -> RunResult:
        result = RunResult(state=result.state, failures={**result.failures, **self._failed_too(result.failures)})
        codes = {failure.exitcode for failure in result.failures.values()}
        stopped = {-signal.SIGTERM, 128 + signal.SIGTERM}
        if codes <= stopped and self._others_change():
            # All ranks have saved after the same step, since another host lets them stop for one that joins.
            self._hosts.ask_for_round()
            return RunResult(state=WorkerState.HEALTHY)
        self._why = self._explain(result.failures)
        self._hosts.heartbeat.leave("failed")
        if _USERS_MISTAKE in codes:
            self._remaining_restarts = 0  # it would be made again
        return result

    def _failed_too(self, told: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Of forked ranks PyTorch tells one alone, even where a whole host's have ended between two looks."""
        context = self._pcontext
        if not isinstance(context, MultiprocessContext) or context._pc is None:
            return {}
        found = {}
        for worker in self._worker_group.workers:
            process = context._pc.processes[worker.local_rank]
            if process.exitcode and worker.global_rank not in told:
                found[worker.global_rank] = ProcessFailure(
                    local_rank=worker.local_rank,
                    pid=process.pid,
                    exitcode=process.exitcode,
                    error_file=context.error_files[worker.local_rank],
                )
        return found

    def _others_change(self) -> bool:
        until = time.monotonic() + _A_WORD
        while self._hosts.peers() and time.monotonic() < until:
            lost = self._hosts.lost()
            if self._hosts.num_nodes_waiting() > 0 or lost is not None:
                return True
            time.sleep(_APART)
        return False

    def _when_all_are_done(self, result: RunResult) -> RunResult:
        """Hosts end together: one that is lost before leaves a round that has to be taken once more."""
        self._hosts.heartbeat.done()
        while not self._hosts.heartbeat.all_done:
            lost = self._hosts.lost()
            if lost is not None and lost.what == "store":
                break  # nothing is left to be done here, and there is no store to ask
            if lost is not None:
                self._leave_for(lost)
                return RunResult(state=WorkerState.HEALTHY)
            time.sleep(_APART)
        return result

    def _exit_barrier(self) -> None:
        """The hosts have told each other that they are done; who holds the round's store leaves last."""
        round_ = self._hosts.round
        with suppress(*BROKEN):
            assert round_ is not None
            round_.store.add("samestep/leave", 1)
            until = time.monotonic() + _LINGER
            while round_.first and round_.store.add("samestep/leave", 0) < len(round_.members):
                if time.monotonic() > until:
                    break
                time.sleep(_APART)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if not self._at_once and self._why is None:
            self._hosts.heartbeat.leave("changes")
            self._let_stop()
        elif self._why is None:
            self._hosts.heartbeat.leave("failed")
        for rank in self._ranks:
            rank.kill()
            rank.close()
        self._ranks = ()
        super()._stop_workers(worker_group)

    def _let_stop(self) -> None:
        """Give the ranks notice and time to save; samestep's own end after a step that all of them take."""
        for rank in self._ranks:
            if rank.alive():
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)
        until = time.monotonic() + (self._rounds.grace_period or self._shutdown_within)
        while time.monotonic() < until and any(rank.alive() for rank in self._ranks):
            lost = self._hosts.lost()
            if lost is not None and (lost.what != "round" or lost.state == "failed"):
                break
            time.sleep(_APART)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # A rank whose starter passes signals on takes no notice of those that a terminal sends to all.
        del death_sig
        if not self._at_once and self._why is None:
            self._hosts.heartbeat.leave("changes")
        super()._shutdown(signal.SIGTERM, min(timeout, self._shutdown_within))


def run(
    config: LaunchConfig, command: str, arguments: Sequence[str], *, explain: Explain, run_place: RunPlace | None
) -> dict[int, Any]:
    """Do one host's part of a job: as PyTorch's `elastic_launch`, for a rendezvous of a job's hosts.

    `run_place`: what a job of samestep's says of its run's folder, which then takes the ranks' files.
    Raises ChildFailedError or HungError where ranks failed and restarts are used up, SignalException where a signal
    ended this host's part, HostLostError where the job can't go on here.
    """
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    forked = arguments_of([command, *arguments])
    if forked is not None:
        warm_up()
    hosts = rendezvous_handler_registry.create_handler(parameters)
    assert isinstance(hosts, MultiNodeRendezvous)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=run_forked if forked is not None else command,
        args=(forked, environment.snapshot()) if forked is not None else tuple(arguments),
        rdzv_handler=hosts,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
    )
    leaves_alone = False
    with (
        environment.agent_signals(config.signals_to_handle),
        scratch("samestep-agent-") as place,
        folder_in_memory() as memory,
    ):
        agent = NodeElasticAgent(spec, config, explain=explain, place=place, memory=memory, run=run_place)
        try:
            result = agent.run()
        except SignalException:
            leaves_alone = True  # the others go on where they may
            raise
        except RendezvousClosedError:
            raise JobOverError(f"{hosts.get_run_id()}: the job is over; another host has ended it") from None
        except RendezvousGracefulExitError:
            return {}
        finally:
            agent.close()
            if leaves_alone:
                hosts.leave()
            else:
                hosts.shutdown()
    if result is None:
        return {}
    if result.is_failed() and agent.hang is not None:
        raise HungError(agent.hang)
    if result.is_failed():
        raise ChildFailedError(name=command, failures=result.failures)
    return result.return_values
