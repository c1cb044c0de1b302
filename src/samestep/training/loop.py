"""The loop over a training's steps: take, log, evaluate, save, and stop where a signal asks for it.

A step's values are read from the device while the next step is computed (`Readout`, `StepLog`). A training goes back
to its last checkpoint when a loss is not finite, and leaves that batch out.

Order within a turn of the loop, the same on every rank: take step k, queue the copy of its values, log step k - 1,
evaluate and save where that is due, see whether a signal has come. Evaluations, checkpoints and stops come after the
same step on all ranks: a rank that left the loop alone would leave the others in the next step's collectives.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.errors import InterruptedJobError
from samestep.fault_tolerance.nonfinite import NonFinite
from samestep.fault_tolerance.rank import RankSupervision
from samestep.training.checkpointing import Checkpoints
from samestep.training.early_stop import Stopped
from samestep.training.metrics_log import Bar, Records, Tally

if TYPE_CHECKING:
    from samestep.training.fit import Training


class Readout:
    """A step's loss, gradient norm and terms, on their way from the device to the host.

    To read a tensor, the host waits until the device has finished all work that was queued before. A report is read
    one step late, when the next step is queued already. So the copy to pinned memory is queued before that step, with
    an event behind it, and reading waits for this event alone.
    """

    def __init__(self, report: StepReport) -> None:
        self.lr = report.lr
        self.sent = report.sent
        self._names = tuple(report.terms)
        values = [report.loss, report.grad_norm, *report.terms.values()]
        device = report.loss.device
        self._done = None
        if device.type == "cpu":
            self._values = values
            return
        numbers = torch.stack([value.detach().to(device, torch.float64) for value in values])
        there = torch.empty(numbers.shape, dtype=torch.float64, pin_memory=True)
        there.copy_(numbers, non_blocking=True)
        self._values = there.unbind()
        self._done = torch.get_device_module(device).Event()
        self._done.record()

    def values(self) -> tuple[float, float, Mapping[str, float]]:
        """Loss, norm of the gradient, and the loss's terms by name; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        loss, grad_norm, *terms = (value.item() for value in self._values)
        return loss, grad_norm, dict(zip(self._names, terms, strict=True))


class StepLog:
    """Takes a step's values once they are known: into the records, the bar, and the sums of the final report."""

    def __init__(
        self, records: Records, bar: Bar, tally: Tally, guard: NonFinite, losses: Sequence[float] = ()
    ) -> None:
        self._guard = guard
        self.records = records
        self.tally = tally
        self.losses = list(losses)  # of all steps, also those before a checkpoint that the records tell of
        self.terms: dict[str, float] = {}  # of which a loss is put together, as the last step with each had them
        self.samples = 0
        self.seconds = 0.0
        self.sent: int | None = None  # bytes that this rank sent in all steps, where they are counted
        self.bar = bar
        self._kept: tuple[StepBatch, Readout, float] | None = None

    def keep(self, batch: StepBatch, report: Readout, seconds: float) -> None:
        """Log a step later, by `flush`: an accelerator may compute its values while the next one is taken."""
        self._kept = batch, report, seconds

    def flush(self) -> None:
        """Log the step that was kept, if there is one. Raises NonFiniteError as `add` does."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.add(*kept)

    def add(self, batch: StepBatch, report: Readout, seconds: float) -> None:
        """Read a step's values, which waits until an accelerator has computed them.

        Raises NonFiniteError where the training must not go on with them.
        """
        loss, grad_norm, terms = report.values()
        self.losses.append(loss)
        self.samples += batch.global_samples
        self.seconds += seconds + batch.data_seconds
        self.tally.add(batch)
        self.terms |= terms
        self.bar.step(loss=loss, lr=report.lr, samples=batch.global_samples, terms=terms)
        self.records.step(
            {
                "step": batch.step,
                "epoch": batch.epoch,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": report.lr,
                **({"losses": terms} if terms else {}),
                "samples": batch.global_samples,
                "step_seconds": seconds,
                "data_seconds": batch.data_seconds,
                **({} if report.sent is None else {"sent_bytes": report.sent}),
            }
        )
        if report.sent is not None:
            self.sent = (self.sent or 0) + report.sent
        self._guard.check(batch.step, loss, grad_norm)

    @property
    def left_out(self) -> Collection[int]:
        """Steps that are not taken."""
        return self._guard.left_out


def take_all_steps(
    training: "Training", log: StepLog, checkpoints: Checkpoints, supervision: RankSupervision
) -> Stopped | None:
    """Take every step, each logged while the next one is computed; evaluate and save in between where asked.

    Returns what an early stop ends with; None after the last step. Raises InterruptedJobError after the step at which
    a signal stops all ranks, which is saved then.
    """
    every = training.recipe.evaluation.every
    stopped = checkpoints.early_stop.stopped()
    if stopped is not None:  # by the run that was saved
        return stopped
    began = time.perf_counter()
    steps = training.steps(measured=training.measured_step, supervision=supervision, left_out=log.left_out)
    for batch, report in steps:
        # Log the step before, while the device computes this one.
        # Before `flush`: the copy is then in the device's queue right behind the step, and not behind the next one.
        reading = Readout(report)
        log.flush()
        now = time.perf_counter()
        log.keep(batch, reading, now - began - batch.data_seconds)
        began = now
        done = batch.step + 1
        if done == training.total_steps:
            break
        # Evaluate and save, where it is time for it.
        looks, saves = every is not None and done % every == 0, checkpoints.due(done)
        if looks or saves:
            log.flush()
            with supervision.phase("evaluation" if looks else "checkpoint"):
                metrics = training.evaluate(log.bar) if looks else None
                if metrics is not None:
                    log.records.evaluation(done, metrics)
                    stopped = checkpoints.early_stop.look(done, metrics)
                if saves or checkpoints.is_best(metrics) or stopped is not None:
                    checkpoints.save(done, metrics)
            if stopped is not None:
                return stopped
            began = time.perf_counter()
        if checkpoints.copy_due(done):
            log.flush()  # a step that is not finite raises, and is not copied
            checkpoints.copy(done)
        # Stop, where a signal has come to any rank.
        if supervision.stop_signal is not None:
            log.flush()
            with supervision.phase("checkpoint"):
                checkpoints.save(done)
            raise InterruptedJobError(supervision.stop_signal)
    log.flush()
    return None
