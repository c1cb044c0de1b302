"""The training loop: take steps, log, evaluate, save checkpoints, and stop on a signal.

A step's values are read from the device while the next step is computed (`Readout`, `StepLog`). What happens at a
loss that is not finite is decided in `fault_tolerance.nonfinite`.

Order within an iteration, the same on every rank: take step k, queue the copy of its values, log step k - 1, evaluate
and save if due, check for a signal. All ranks evaluate, save and stop after the same step: a rank that left the loop
alone would leave the others waiting in the next step's collectives.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.errors import InterruptedJobError
from samestep.fault_tolerance.nonfinite import NonFinite
from samestep.fault_tolerance.rank import RankSupervision
from samestep.hooks import Ask, Evaluated, Saved, Stepped
from samestep.progress.bars import Bar
from samestep.training.checkpointing import Checkpoints
from samestep.training.early_stop import Stopped
from samestep.training.hooked import CalledHooks
from samestep.training.metrics_log import SKIPPED, Records, Tally

if TYPE_CHECKING:
    from samestep.training.fit import Training


class Readout:
    """An asynchronous copy of a step's loss, gradient norm and loss terms from the device to the host.

    `tensor.item()` waits until the device has finished all work queued before it. A report is read one step late,
    when the next step is already queued. So the copy to pinned memory is queued before that step, followed by an
    event, and reading waits for this event only.
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
        """Wait for the copy, and return the loss, the gradient norm, and the loss's terms by name."""
        if self._done is not None:
            self._done.synchronize()
        loss, grad_norm, *terms = (value.item() for value in self._values)
        return loss, grad_norm, dict(zip(self._names, terms, strict=True))


class StepLog:
    """Logs each step's values to the records and the progress bar, and sums them for the final report."""

    def __init__(
        self,
        records: Records,
        bar: Bar,
        tally: Tally,
        guard: NonFinite,
        losses: Sequence[float] = (),
        hooks: CalledHooks | None = None,
    ) -> None:
        self._guard = guard
        self.records = records
        self.hooks = hooks
        self.tally = tally
        self.losses = list(losses)  # of all steps, with those before a checkpoint if the records have them
        self.terms: dict[str, float] = {}  # the latest value of each term of the loss
        self.samples = 0
        self.seconds = 0.0
        self.sent: int | None = None  # bytes that this rank sent in all steps, if counted
        self.skipped: Callable[[], int] = lambda: 0  # saves that were left out so far
        self.bar = bar
        self._kept: tuple[StepBatch, Readout, float] | None = None

    def keep(self, batch: StepBatch, report: Readout, seconds: float) -> None:
        """Keep a step for `flush` to log, so that an accelerator may compute it while the next one is queued."""
        self._kept = batch, report, seconds

    def flush(self) -> None:
        """Log the kept step, if there is one. Raises NonFiniteError as `add` does."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.add(*kept)

    def add(self, batch: StepBatch, report: Readout, seconds: float) -> None:
        """Wait for a step's values and log them.

        Raises NonFiniteError for a loss or a gradient norm that is not finite, unless such steps are skipped.
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
                **({SKIPPED: skipped} if (skipped := self.skipped()) else {}),
            }
        )
        if report.sent is not None:
            self.sent = (self.sent or 0) + report.sent
        self._guard.check(batch.step, loss, grad_norm)
        if self.hooks is not None:
            self.hooks.stepped(
                Stepped(
                    step=batch.step,
                    epoch=batch.epoch,
                    loss=loss,
                    grad_norm=grad_norm,
                    lr=report.lr,
                    samples=batch.global_samples,
                    losses=terms,
                    seconds=seconds,
                )
            )

    def asked(self, step: int) -> Ask:
        """What the hooks ask for after `step` steps; every rank must call it."""
        if self.hooks is None:
            return Ask()
        ask = self.hooks.asked()
        if ask.log:
            self.records.further(step, ask.log)
        return ask

    @property
    def left_out(self) -> Collection[int]:
        """Steps that are not taken, as a rollback left them out."""
        return self._guard.left_out


def take_all_steps(
    training: "Training", log: StepLog, checkpoints: Checkpoints, supervision: RankSupervision
) -> Stopped | None:
    """Take every step, log it while the next one is computed, and evaluate and save where due.

    Returns the early stop, or None after the last step. When a signal stops all ranks, saves a checkpoint and raises
    InterruptedJobError.
    """
    every = training.recipe.evaluation.steps_between(training.steps_per_epoch)
    stopped = checkpoints.early_stop.stopped()
    if stopped is not None:  # by the run whose checkpoint was loaded
        return stopped
    began = time.perf_counter()
    steps = training.steps(measured=training.measured_step, supervision=supervision, left_out=log.left_out)
    for batch, report in steps:
        # Log the previous step while the device computes this one. The copy is queued before `flush`, so that it
        # stands right behind this step in the device's queue.
        reading = Readout(report)
        log.flush()
        if batch.step > training.first_step:  # and the first one is finite
            checkpoints.begin()
        now = time.perf_counter()
        log.keep(batch, reading, now - began - batch.data_seconds)
        began = now
        done = batch.step + 1
        if done == training.total_steps:
            break
        # Evaluate and save, if due.
        ask = log.asked(done)
        looks = ask.evaluate or (every is not None and done % every == 0)
        saves = checkpoints.due(done) or ask.save
        if ask.stop is not None:
            log.flush()
            return Stopped(step=done, reason=f"stopped early after step {done:,} by a hook: {ask.stop}")
        if looks or saves:
            log.flush()
            with supervision.phase("evaluation" if looks else "checkpoint"):
                metrics = training.evaluate(log.bar) if looks else None
                if metrics is not None:
                    log.records.evaluation(done, metrics)
                    if log.hooks is not None:
                        log.hooks.evaluated(Evaluated(step=done, metrics=metrics))
                    stopped = checkpoints.early_stop.look(done, metrics)
                if saves or checkpoints.is_best(metrics) or stopped is not None:
                    checkpoints.save(done, metrics)
                    if log.hooks is not None:
                        log.hooks.saved(Saved(step=done))
            if stopped is not None:
                return stopped
            began = time.perf_counter()
        if checkpoints.copy_due(done):
            log.flush()  # raises for a step that is not finite, before it is copied
            checkpoints.copy(done)
        # Stop, if any rank has received a signal.
        if supervision.stop_signal is not None:
            log.flush()
            with supervision.phase("checkpoint"):
                checkpoints.save(done)
            raise InterruptedJobError(supervision.stop_signal)
    log.flush()
    return None
