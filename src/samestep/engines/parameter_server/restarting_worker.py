"""RestartingWorker: a worker that computes in a process of its own, whose death does not stop the other workers.

    computes --(its process dies)--> away --(a new process is ready)--> catches up --(no step behind)--> computes
                                      |
                                      +--(no restart is left)--> lost, to the end of the round

The rank itself stays in all process groups, goes through every step, and meets the others where all ranks meet. While
it is away it pushes headers without a gradient: its samples of these steps are left out, and are counted.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.engines.parameter_server.member import ServerSetup
from samestep.engines.parameter_server.messages import Push, PushHeader, PushKind, ReplyHeader
from samestep.engines.parameter_server.worker import Worker
from samestep.engines.parameter_server.worker_process import ProcessDiedError, WorkerProcess
from samestep.engines.setup import TrainerSetup
from samestep.parallel.holdings import Holdings
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import Piece
from samestep.tasks.losses import TaskLoss
from samestep.torch_internals.operators import innermost_mode


class RestartingWorker(Worker):
    """One worker's steps, computed in a process that may die `worker_restarts` times."""

    def __init__(self, setup: TrainerSetup, shared: ServerSetup) -> None:
        super().__init__(setup, shared)
        self._process = WorkerProcess(self.model, self.flat, self._compute)
        self._deaths = 0
        self._away = self._lost = False
        self._slowest = 0.0  # step count of the slowest present worker, from the last reply

    def _step(self, batch: StepBatch, loss: TaskLoss) -> StepReport:
        # The rank itself computes the first step, in which all ranks check the model, and steps under a dispatch
        # mode, which counts the operators of its own thread.
        if not self._away and (self._steps == 0 or innermost_mode() is not None):
            return super()._step(batch, loss)
        if self._away and (self._lost or self._steps < self._slowest):
            return self._miss(batch)
        if self._away:
            self._return()
        self._forget_gradients()
        try:
            totals, gradients = self._process.compute(batch, loss)
        except ProcessDiedError as death:
            self._leave(death, batch, loss)
            return self._miss(batch)
        return self._push_and_pull(batch, totals, gradients)

    def _leave(self, death: ProcessDiedError, batch: StepBatch, loss: TaskLoss) -> None:
        """Report the worker as away to the servers, and start another process if a restart is left."""
        self._away = True
        self._tell(PushKind.AWAY, batch)
        self.wire.wait()
        limit = self.settings.worker_restarts or 0
        while True:
            self._deaths += 1
            self._lost = self._deaths > limit
            after = "the others go on without it" if self._lost else f"it comes back, time {self._deaths} of {limit}"
            print(
                f"samestep: the process of worker {self._worker} (rank {self.roles.workers[self._worker]}) died in "
                f"step {batch.step}: {death}; {after}",
                file=sys.stderr,
                flush=True,
            )
            if self._lost:
                self._process.close()
                return
            try:
                self._process.start(loss)
            except ProcessDiedError as again:
                death = again
            else:
                return

    def _miss(self, batch: StepBatch) -> StepReport:
        """Skip a step, and receive the servers' replies."""
        self._tell(PushKind.LOST if self._lost else PushKind.MISSED, batch)
        return self._report(self._heard(self.wire.receive_headers(self.roles.servers)))

    def _return(self) -> None:
        """Report the worker as back, and receive the current parameters."""
        self._tell(PushKind.BACK, None)
        self._heard(self.wire.receive_replies(self.roles.servers, self._shards()))
        self.wire.wait()
        self._changed, self._away = True, False

    def _tell(self, kind: PushKind, batch: StepBatch | None) -> None:
        """Push a header without a gradient to every server."""
        facts = PushHeader(
            loss=0.0,
            count=0.0,
            samples=batch.local_samples if batch is not None else 0,
            global_samples=batch.global_samples if batch is not None else 0,
            norm=math.nan,
            stop_at=self._stop_at,
            kind=kind,
        )
        for number, server in enumerate(self.roles.servers):
            chunks = self.flat.chunks[number]
            self.wire.push(server, facts, Push(chunks, [None] * len(chunks), sparse=False))

    def _heard(self, answers: list[ReplyHeader]) -> list[ReplyHeader]:
        self._slowest = max(answer.slowest for answer in answers)
        return answers

    @property
    def _worker(self) -> int:
        """This worker's number."""
        return self._mesh.data_place.index

    def settle(self) -> None:
        """End the worker's process after the last step; a further step would start it again."""
        super().settle()
        self._process.close()

    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        super().restore(step, saved, read, scaler)
        self._process.close()  # it has buffers and frozen parameters as they were

    def holdings(self) -> Holdings:
        held = super().holdings()
        return replace(held, gradients=[*held.gradients, self._process.memory])

    def elsewhere_seconds(self) -> float:
        return self._process.seconds
