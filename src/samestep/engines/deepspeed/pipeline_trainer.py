"""The trainer on DeepSpeed's pipeline: its schedule and its messages, with the loss of one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.loader import MicroBatch, Moment, StepBatch
from samestep.engines.base import Loss, StepReport
from samestep.engines.deepspeed import shards
from samestep.engines.deepspeed.pipeline import Stages, one_input, sendable
from samestep.engines.deepspeed.start import without_deprecations
from samestep.engines.deepspeed.trainer import DeepSpeedTrainer
from samestep.tasks.out_of_range import in_one_sentence


@dataclass(kw_only=True)
class _Step:
    """The step that runs."""

    batch: StepBatch
    loss: Loss
    totals: Tensor  # [loss sum, count, parameters that a rank did not use]
    moments: Iterator[Moment] = field(init=False)  # of this stage's forwards, which run in order
    lr: float = 0.0

    def __post_init__(self) -> None:
        self.moments = iter([micro_batch.moment for micro_batch in self.batch.micro_batches])


class PipelineTrainer(DeepSpeedTrainer):
    """One call of DeepSpeed's `train_batch` is a step, from the first forward to the optimizer."""

    def __init__(self, *, stages: Stages, **common: Any) -> None:
        super().__init__(**common)
        self._stages = stages
        self._running: _Step | None = None  # none while it evaluates
        module = self.engine.module
        module.forward = self._in_its_moment(module.forward)
        module.loss_fn = self._loss
        schedule: Any = self._package.runtime.pipe.schedule
        # By these instructions DeepSpeed runs a schedule. All are its own, with checks and the count before.
        instructions = type(self.engine)._INSTRUCTION_MAP
        self._reduce_gradients = instructions[schedule.ReduceGrads]
        self._optimizer_step = instructions[schedule.OptimizerStep]
        self.engine._INSTRUCTION_MAP = {
            **instructions,
            schedule.ReduceGrads: self._check_and_reduce,
            schedule.OptimizerStep: self._settle_and_step,
        }

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        with without_deprecations(), in_one_sentence(f"step {batch.step}", batch.samples):
            running = self._running = _Step(batch=batch, loss=loss, totals=self._begin())
            self.engine.micro_batches = len(batch.micro_batches)
            # The loss finds its targets in the micro-batch, so that stands for the labels.
            pairs = ((self._inputs(each), each) for each in batch.micro_batches)
            self.engine.train_batch(pairs)
            self._running = None
            return self._report(running.totals, running.lr)

    def _inputs(self, micro_batch: MicroBatch) -> Tensor:
        return self._as_computed(one_input(micro_batch.batch.inputs))

    def _in_its_moment(self, forward: Any) -> Any:
        """The forward of this rank's layers, for the samples of its turn."""
        hands_on = self._stages.mine < self._layout.pipeline - 1

        @wraps(forward)
        def run(inputs: Any) -> Any:
            running = self._running
            with nullcontext() if running is None else self._now.at(next(running.moments)):
                output = forward(inputs)
            return sendable(output, self._stages.mine) if hands_on else output

        return run

    def _loss(self, output: Any, micro_batch: MicroBatch | None) -> Tensor:
        """What backward starts from, on the last stage."""
        running = self._running
        if running is None or micro_batch is None:
            return torch.zeros((), device=self._device)  # predictions alone are asked for
        with self._now.at(micro_batch.moment):
            term = self._term(output, micro_batch, running.loss, running.totals)
        # DeepSpeed divides by the accumulation steps of its configuration, whatever this step has.
        return term * (self._scale(running.batch) * self.engine.gradient_accumulation_steps())

    def _check_and_reduce(self, engine: Any, **keywords: Any) -> None:
        self._gradients.check_before_reducing()
        self._reduce_gradients(engine, **keywords)

    def _settle_and_step(self, engine: Any, **keywords: Any) -> None:
        """When all stages are done with all micro-batches, and their gradients are averaged over the replicas."""
        running = self._running
        assert running is not None
        self._settle(running.batch, running.totals)
        running.lr = engine.get_lr()[0]
        # It counts whole batches, and the last may be shorter.
        engine.global_samples += running.batch.global_samples - engine.train_batch_size()
        self._optimizer_step(engine, **keywords)

    def predict(self, inputs: Any) -> Any:
        given = self._as_computed(one_input(inputs))
        with without_deprecations(), self._without_monitor():
            _, output = self.engine.eval_batch(
                iter([(given, None)]), return_logits=True, reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return output

    @contextmanager
    def _without_monitor(self) -> Iterator[None]:
        """While predictions are made: it would write down a loss that nobody has computed."""
        monitor = self.engine.monitor
        enabled, monitor.enabled = monitor.enabled, False
        try:
            yield
        finally:
            monitor.enabled = enabled

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, self._from_its_stage(name, parameter)

    def state(self) -> dict[str, Tensor]:
        values = self.model.state_dict(keep_vars=True)
        return {name: self._from_its_stage(name, value).cpu().clone() for name, value in values.items()}

    def _from_its_stage(self, name: str, value: Tensor) -> Tensor:
        """A parameter in float32, or a buffer, on every rank of the pipeline."""
        stage = self._stages.stage_of[name]
        dtype = self._whole_dtype if isinstance(value, nn.Parameter) else value.dtype
        if stage == self._stages.mine:
            with without_deprecations():
                whole = shards.whole(value, self._package, dtype).contiguous()
        else:
            whole = torch.empty(value.shape, dtype=dtype, device=self._device)
        dist.broadcast(whole, src=self._mesh.ranks("pipeline")[stage], group=self._mesh.group("pipeline"))
        return whole
