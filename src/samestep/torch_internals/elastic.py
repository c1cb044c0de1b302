"""PyTorch's elastic agent, with names of one's own for the steps of a round that a subclass may change.

Imports `torch.distributed.elastic`, which `import torch` doesn't.
"""

import inspect
import signal
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

# Its methods' decorators hide their types.
_LocalElasticAgent: Any = LocalElasticAgent
_TAKES_TIMEOUT = "timeout" in inspect.signature(LocalElasticAgent._shutdown).parameters  # since PyTorch 2.12


class ElasticAgent(_LocalElasticAgent):
    """The agent of one host. `run()` calls the steps below; each does what PyTorch's own agent does.

    A step that PyTorch no longer calls would silently do nothing, so `tests/test_torch_internals.py` compares their
    signatures, and the tests of the launcher run rounds.
    """

    def __init__(self, *, shutdown_timeout: int, **settings: Any) -> None:
        """`shutdown_timeout`: the ranks' seconds to end after SIGTERM. PyTorch's agent takes it since 2.12."""
        super().__init__(**settings)
        self._shutdown_timeout = shutdown_timeout

    def rendezvous(self, group: WorkerGroup) -> None:
        """Meet the other hosts, and number this host's ranks."""
        super()._rendezvous(group)

    def number_ranks(self, store: Any, host: int, hosts: int, spec: WorkerSpec) -> list[Worker]:
        """The ranks of this host, which is number `host` of the round; part of the rendezvous."""
        return super()._assign_worker_ranks(store, host, hosts, spec)

    def start_ranks(self, group: WorkerGroup) -> dict[int, Any]:
        """Start a process for each rank; returns its id by local rank."""
        return super()._start_workers(group)

    def monitor(self, group: WorkerGroup) -> RunResult:
        """The state of the ranks; called again and again until they are done, have failed, or a new round begins."""
        return super()._monitor_workers(group)

    def leave_round(self) -> None:
        """Wait for the other hosts, after all ranks are done."""
        super()._exit_barrier()

    def stop_ranks(self, group: WorkerGroup) -> None:
        """End the ranks before another round."""
        super()._stop_workers(group)

    def shut_down(self, death_signal: signal.Signals, timeout: int) -> None:
        """End the ranks for good: by a signal, and by SIGKILL after `timeout` seconds."""
        if _TAKES_TIMEOUT:
            super()._shutdown(death_signal, timeout)
            return
        if self._pcontext:  # in PyTorch 2.11 the agent would give the ranks 30 s
            self._pcontext.close(death_signal, timeout)
        super()._shutdown(death_signal)

    @property
    def group(self) -> Any:
        """This host's ranks, and its number in the round: a WorkerGroup."""
        return self._worker_group

    @property
    def grace_period(self) -> int:
        """Seconds for ranks to end after SIGTERM, the agent's `shutdown_timeout`."""
        return self._shutdown_timeout

    @property
    def restarts_left(self) -> int:
        """How often failed ranks may still be started again; the agent reads it after `monitor`."""
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, number: int) -> None:
        self._remaining_restarts = number

    @property
    def context(self) -> Any:
        """The ranks' processes, MultiprocessContext for a function, SubprocessContext for a command; first None."""
        return self._pcontext

    def forked(self) -> list[Any] | None:
        """The processes that run a function, by local rank; None for a command's, and before the start."""
        context = self._pcontext
        if not isinstance(context, MultiprocessContext) or context._pc is None:
            return None
        return cast(list[Any], context._pc.processes)

    def has_returned(self, local_rank: int) -> bool:
        """Whether the function of a rank has returned, as far as the agent has read."""
        return local_rank in self._pcontext._return_values

    # PyTorch's names of these steps, by which its `run()` calls them.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        return self.number_ranks(store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_ranks(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor(worker_group)

    def _exit_barrier(self) -> None:
        self.leave_round()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_ranks(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        self.shut_down(death_sig, self._shutdown_timeout if timeout is None else timeout)
