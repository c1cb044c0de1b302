"""The native trainer: samestep's own step on torch.distributed, the same code for one rank and for many.

How a step is weighed. A task's loss gives a sum and a count for a micro-batch: sum_m over its terms (samples, or
tokens that aren't masked) and count_m. One process would minimise sum / count over the global batch. Here:

    1. each micro-batch's sum is multiplied by weight_m * D / S, with D data ranks and S samples of the global batch;
       weight_m is 0 for a micro-batch of another rank's samples (`data.order.Share`) and 1 for others. S is known
       before the forward; the count of terms is not.
    2. backward adds these up over micro-batches, and averages over the D ranks: sum_m gradient(sum_m) / S.
    3. the counts are summed over ranks meanwhile, and the gradient is multiplied by S / count.

So micro-batches and ranks of unequal sizes are weighted by their terms, and no rank waits for counts before backward.
Loss and count are summed in float64, in which counts are exact and the order of summation does not matter.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.loader import MicroBatch, StepBatch
from samestep.engines.base import Checkpointed, Loss, Skipping, StepReport, TurnTaking, scale_to_mean
from samestep.engines.setup import TrainerSetup
from samestep.errors import UserError, index_errors_explained
from samestep.parallel.exact import generators
from samestep.parallel.holdings import Holdings, holdings
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.loss.step import step_loss
from samestep.parallel.optimizer.average import WeightAverage
from samestep.parallel.optimizer.joined import Joined
from samestep.parallel.optimizer.master_weights import MasterWeights
from samestep.parallel.optimizer.offloaded import OffloadedOptimizer
from samestep.parallel.optimizer.rounded import RoundedState
from samestep.parallel.own_backwards import own_backwards_refused
from samestep.parallel.own_messages import own_messages_refused
from samestep.parallel.sharding import Entry, ShardTable, local
from samestep.parallel.state_shards import (
    OptimizerToFill,
    Piece,
    innermost,
    model_entries,
    model_pieces,
    optimizer_pieces,
)
from samestep.parallel.valueless import has_values
from samestep.profiling.clock import Phase, StepClock, with_end_of_gradients
from samestep.tasks.base import InTurn
from samestep.tasks.losses import TaskLoss, task_loss
from samestep.tasks.turns import StepTurns, Turn
from samestep.torch_internals import foreach
from samestep.torch_internals.optimizers import take_step

_CASTS_NOTHING = (torch.optim.AdamW, torch.optim.SGD)


def _stepping(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The innermost optimizers, inside of wrappers that step copies of the parameters."""
    for inner in innermost(optimizer):
        yield from (
            inner.stepping() if isinstance(inner, (OffloadedOptimizer, MasterWeights, RoundedState)) else (inner,)
        )


class NativeTrainer(Checkpointed, Skipping, TurnTaking):
    """Takes steps whose gradient is the sum over the global batch / the global count, however it is cut.

    What it leaves to others: `ParallelModel` sends the gradients, `Precision` casts and scales the loss, the
    optimizer may be a wrapper (offloaded, sharded, with master weights). Every rank calls the same methods in the
    same order.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        how = setup.how
        self.model = setup.model
        self.optimizer = setup.optimizer
        self.schedule = setup.schedule
        self._spread = setup.spread_model
        self.timeline = setup.spread_model.timeline
        self._precision = setup.precision
        self._clip = how.options.clip
        self._mesh = how.mesh
        self._device = how.device
        self._draws_checked = not setup.answers_draws
        self._failures_of_step = self._failures_of_forward = setup.failures
        self._casts = not all(type(inner) in _CASTS_NOTHING for inner in _stepping(setup.optimizer))
        self._average = None if how.options.average is None else WeightAverage(setup.model, how.options.average)
        self._copies: list[tuple[nn.Parameter, int]] | None = None

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Take one step over the global batch. In the first step, errors caused by the layout become LayoutError."""
        failures, self._failures_of_step = self._failures_of_step, None
        if failures is None:
            return self._step(batch, task_loss(loss))
        with self._watched(failures):
            return self._step(batch, replace(task_loss(loss), errors=failures.of_task))

    @contextmanager
    def _watched(self, failures: LayoutFailures) -> Iterator[None]:
        """Context of the first step, in which what a model does past its layout is refused."""
        layout = self._spread.parts.layout
        with (
            failures.explained(),
            own_messages_refused(self.model, layout),
            own_backwards_refused(self.model, layout),
        ):
            yield

    def _step(self, batch: StepBatch, loss: TaskLoss) -> StepReport:
        """Run forward and backward, then clip and step; both phases are timed if steps are profiled."""
        with self._phase("forward"):
            if not self.model.training:
                self.model.train()
            self._forget_gradients()
            # Buffers such as running means are restored if the step is skipped.
            kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()] if self.skips_nonfinite else []
            totals = self.backward(batch, loss)
        with self._phase("optimizer"):
            return self._change(batch, loss, totals, kept)

    def _forget_gradients(self) -> None:
        """Clear all gradients, also of parameters outside of the optimizer, which would otherwise accumulate."""
        if self._copies is None:
            self.model.zero_grad()
            return
        for parameter, _ in self._copies:
            parameter.grad = None

    def step_in_turns(self, batch: StepBatch, turns: StepTurns) -> StepReport:
        """Take a step in turns. Each turn's gradient is clipped separately; loss and norm are those of all turns."""
        failures, self._failures_of_step = self._failures_of_step, None
        losses: dict[str, Tensor] = {}
        every: dict[str, Tensor] = {}
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients: dict[nn.Parameter, Tensor] = {}
        lr = self.optimizer.param_groups[0]["lr"]
        for turn in turns.of_step(batch.step):
            with nullcontext() if failures is None else self._watched(failures):
                errors = nullcontext if failures is None else failures.of_task
                loss = replace(turn.task_loss(), nonfinite=turns.nonfinite, errors=errors)
                losses[turn.name], norm, terms = self._take_turn(turn, batch_of_turn(batch, turn), loss)
            every |= {
                turn.name: losses[turn.name],
                **{f"{turn.name}.{name}": value for name, value in terms.items()},
            }
            squares += norm.double().square()
            gradients |= {
                parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
            }
        for parameter, gradient in gradients.items():
            parameter.grad = gradient  # as other steps leave them
        if self.schedule is not None:
            self.schedule.step()
        self._after(batch.step)
        total = torch.stack(list(losses.values())).sum()
        return StepReport(loss=total, grad_norm=squares.sqrt(), lr=lr, terms=every)

    def _take_turn(self, turn: Turn, batch: StepBatch, loss: TaskLoss) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Step the parameters of a turn. Returns its loss, its gradient norm before clipping, and its loss terms."""
        with self._phase("forward"):
            self.model.train()
            self.model.zero_grad()
            kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()] if self.skips_nonfinite else []
            totals = self.backward(batch, loss)
            for name, parameter in self.model.named_parameters():
                if not turn.steps(name):
                    parameter.grad = None  # which the optimizer passes over
        with self._phase("optimizer"):
            totals[1].clamp_(min=1)
            grad_norm = self.scale_and_clip(batch, totals)
            if self.skips_nonfinite and not self._is_finite(totals, grad_norm):
                for buffer, value in kept:
                    buffer.copy_(value)
            else:
                with self.optimizer.in_turn(turn.name) if isinstance(self.optimizer, Joined) else nullcontext():
                    self._step_optimizer()
        return totals[0] / totals[1], grad_norm, _terms(loss, totals)

    def _phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Time a block of code as a phase of the step, if steps are profiled."""
        clock = self._running_clock()
        return nullcontext() if clock is None else clock.of(phase)

    def _running_clock(self) -> StepClock | None:
        return self.clock if self.clock is not None and self.clock.runs else None

    def _change(
        self, batch: StepBatch, loss: TaskLoss, totals: Tensor, kept: Sequence[tuple[Tensor, Tensor]]
    ) -> StepReport:
        """Clip the gradients and step. `kept`: buffers and their values to restore if the step is skipped."""
        # A batch without terms (every token masked) has a zero gradient; 0 / 0 would turn the weights into NaN.
        totals[1].clamp_(min=1)
        grad_norm = self.scale_and_clip(batch, totals)
        lr = self.optimizer.param_groups[0]["lr"]
        if self.skips_nonfinite and not self._is_finite(totals, grad_norm):
            for buffer, value in kept:
                buffer.copy_(value)
            self.pass_over()
        else:
            self.update()
        self._after(batch.step)
        return StepReport(loss=totals[0] / totals[1], grad_norm=grad_norm, lr=lr, terms=_terms(loss, totals))

    def _after(self, step: int) -> None:
        """Update the moving average with the new parameters, once they have arrived."""
        if self._average is not None:
            self._spread.settle()
            self._average.after(step + 1)

    def _is_finite(self, totals: Tensor, grad_norm: Tensor) -> bool:
        """Whether a step can be taken; the same on every rank, since the whole gradient's norm is."""
        # With a scaled loss, the scaler itself skips steps whose gradients overflow, and lowers the scale.
        return self._precision.scales or bool(torch.isfinite(totals[0] + grad_norm))

    def pass_over(self) -> float:
        """Skip a step: advance the schedule, but change neither parameters nor optimizer state. Returns the rate."""
        lr = self.optimizer.param_groups[0]["lr"]
        if self.schedule is not None:
            with warnings.catch_warnings():  # the schedule warns if the optimizer has not stepped before it
                warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)`")
                self.schedule.step()
        return lr

    def backward(self, batch: StepBatch, loss: TaskLoss) -> Tensor:
        """Leave sum over the global batch / its samples in the gradients.

        Returns over all ranks [loss sum, count], and behind them sums and counts of the loss's terms, where it
        has several.
        """
        pending: list[dist.Work | None] = []
        of_step = step_loss(loss, batch, self._spread, self._mesh)
        backward = of_step.backward(self._precision.backward)
        # [loss sum, count, sums of terms ..., counts of terms ...] of this rank, and of all ranks once `pending` is
        # done.
        totals = torch.zeros(2 + 2 * len(of_step.names), dtype=torch.float64, device=self._device)
        clock = self._spread.clock = self._running_clock()
        if clock is not None:
            backward = with_end_of_gradients(clock, backward)

        def term(output: Any, micro_batch: MicroBatch) -> Tensor:
            """The weighted loss sum of a micro-batch, from which backward starts; called on ranks with the output."""
            loss_sum, count = of_step.of(output, micro_batch)
            # Zero-weight samples take part in every message.
            totals[0] += loss_sum.detach() * micro_batch.weight
            totals[1] += count * micro_batch.weight
            return self._precision.scaled(loss_sum * (micro_batch.weight * self.gradient_scale(batch)))

        def forwards_done() -> None:
            # After the last forward `totals` is final, so its all-reduce may overlap with backward.
            of_step.add_terms(totals[2:])
            pending.append(self.sum_totals(totals))

        checking = nullcontext() if self._draws_checked else self._no_other_draws()
        with index_errors_explained(f"step {batch.step}", batch.samples), checking, self._precision.throughout():
            of_step.prepare()
            self._spread.forward_backward(
                batch.micro_batches, term=term, backward=backward, forwards_done=forwards_done
            )
        for work in pending:
            if work is not None:
                work.wait()
        return totals

    def sum_totals(self, totals: Tensor) -> dist.Work | None:
        """Sum [loss sum, count] over the ranks, as part of another message or in an asynchronous all-reduce."""
        if self._mesh.loss_group.size() == 1 or self._spread.sum_along(totals):
            return None
        return dist.all_reduce(totals, group=self._mesh.loss_group, async_op=True)

    @contextmanager
    def _no_other_draws(self) -> Iterator[None]:
        """Raise UserError if the first step draws random numbers other than by sample number (`exact.dropout`)."""
        before = generators.state_of_torch(self._device)
        with generators.seedings_taken_back(self._device):
            yield
        who = generators.moved(before, generators.state_of_torch(self._device))
        if who is not None:
            raise UserError(
                f"the first step drew from {who} generator of random numbers, in a compiled block, a kernel or the "
                "loss, so every layout would draw others; use nn.Dropout or torch.rand of shape [samples, ...] and "
                "run.compile: false, or recipe.dropout: false"
            )
        self._draws_checked = True

    def gradient_scale(self, batch: StepBatch) -> float:
        """The factor of a rank's loss sum."""
        return scale_to_mean(self._mesh, batch)

    def scale_and_clip(self, batch: StepBatch, totals: Tensor) -> Tensor:
        """Turn sum / samples into sum / count, clip the whole gradient's norm, and return it as it was before."""
        # fp16 scales the loss against underflow; the norm and the clip want true gradients, and all ranks must agree
        # whether any of theirs overflowed.
        self._precision.unscale(self.optimizer, dist.group.WORLD if self._mesh.grid.size() > 1 else None)
        samples_to_terms = batch.global_samples / totals[1]
        # The norm is homogeneous, so it is taken once of sum / samples, and the factor for the count and that for
        # clipping go over the gradients together.
        norm = self._gradient_norm() * samples_to_terms
        coefficient = samples_to_terms
        if self._clip is not None:
            # As torch.nn.utils.clip_grad_norm_ has it, with its 1e-6.
            coefficient = coefficient * torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        # Reading the value would make the host wait for an accelerator; on a CPU it saves a pass over the gradients.
        if self._device.type != "cpu" or not has_values(coefficient) or coefficient != 1:
            for gradients in _alike([local(p.grad) for p in self.stepped() if p.grad is not None]):
                foreach.mul_(gradients, coefficient.to(gradients[0].device, _wide(gradients[0].dtype)))
        return norm

    def stepped(self) -> Iterator[nn.Parameter]:
        """The parameters whose gradients this rank scales and steps with."""
        return self.model.parameters() if self._copies is None else (parameter for parameter, _ in self._copies)

    def _gradient_norm(self) -> Tensor:
        """The norm of the whole gradient: each rank's squares over the number of ranks that hold them, summed."""
        parts = self._spread.parts
        by_copies: dict[int, list[Tensor]] = {}
        # Made at the first norm: by then parameters are those that the optimizer steps.
        if self._copies is None:  # walking through a model takes longer than the norm of a small one
            self._copies = [
                (parameter, parts.copies(name, parameter)) for name, parameter in self.model.named_parameters()
            ]
        # Grouped by how many ranks hold the same, so that each group is one pass over a list of tensors.
        for parameter, copies in self._copies:
            if parameter.grad is not None:
                by_copies.setdefault(copies, []).append(local(parameter.grad))
        squares = torch.zeros((), dtype=torch.float64, device=self._device)  # [] of this rank
        for copies, gradients in by_copies.items():
            for same in _alike(gradients):
                norms = torch.stack(foreach.norm(same, 2, _wide(same[0].dtype))).to(squares)
                # A gradient that `copies` ranks of the norm group hold is counted by each of them with 1 / copies.
                squares += norms.square().sum() / copies
        group = parts.norm_group()
        if group is not None:
            # One number over the ranks that hold different parts; all of them clip by the same norm.
            dist.all_reduce(squares, group=group)
        return squares.sqrt()

    def update(self) -> None:
        """Step the optimizer and the schedule."""
        self._step_optimizer()
        if self.schedule is not None:
            self.schedule.step()

    def _step_optimizer(self) -> None:
        # An optimizer of one's own may cast what it computes with, as Muon does to bfloat16.
        with self._precision.throughout() if self._casts else nullcontext():
            self._precision.update(self.optimizer)

    def predict(self, inputs: Any) -> Any:
        """The output in evaluation mode; None on a rank without the last stage. Every rank calls."""
        if self.model.training:
            self.model.eval()
        failures, self._failures_of_forward = self._failures_of_forward, None
        with self._precision.throughout(), nullcontext() if failures is None else failures.explained():
            return self._spread.predict(inputs)

    def settle(self) -> None:
        self._spread.settle()

    def averaged(self) -> AbstractContextManager[None]:
        """Code in which the model has the moving average for its weights, where there is one."""
        self._spread.settle()
        return nullcontext() if self._average is None else self._average.in_place()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, one at a time; every rank must ask to the end."""
        self._spread.settle()
        return self._spread.parts.whole_parameters(self.model)

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """(name, key, tensor) of whole parameters' state; nothing where ranks hold parts of it."""
        if self._spread.parts.layout.replicate != self._spread.parts.layout.size:
            # A generator, so that without a yield it gives nothing.
            return  # ranks hold parts of it
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in innermost(self.optimizer):
            for parameter, state in optimizer.state.items():
                for key in keys:
                    if isinstance(value := state.get(key), Tensor) and value.shape == parameter.shape:
                        yield names[parameter], key, value

    def holdings(self) -> Holdings:
        """What this rank keeps between steps."""
        spread = self._spread
        return holdings(
            self.model,
            self.optimizer,
            spread.parts.layout,
            host_activations=spread.host.buffers(),
            average=() if self._average is None else self._average.tensors(),
            file=spread.disk,
        )

    def state(self) -> dict[str, Tensor]:
        return self._whole_state(kept=True)

    def state_to_write(self, *, kept: bool) -> dict[str, Tensor]:
        return self._whole_state(kept=kept)

    def _whole_state(self, *, kept: bool) -> dict[str, Tensor]:
        """The whole model's state dict on the CPU; every rank must ask."""
        self._spread.settle()
        return self._spread.parts.whole_state(self.model, kept=kept)

    def entries(self) -> Mapping[str, Entry]:
        return model_entries(self._spread.parts)

    def frozen(self) -> frozenset[str]:
        return self._spread.parts.frozen

    def tied(self) -> Mapping[str, str]:
        return self._spread.parts.tied

    def pieces(self) -> dict[str, Piece]:
        """Everything that a checkpoint gets of this rank: model, optimizer, moving average."""
        self._spread.settle()
        return {
            **model_pieces(self.model, self._spread.parts),
            **optimizer_pieces(self.optimizer, *self._optimized()),
            **({} if self._average is None else self._average.pieces(self._spread.parts)),
        }

    def _optimized(self) -> tuple[nn.Module, ShardTable]:
        """The module whose parameters the optimizer steps, and the table of their shards."""
        return self.model, self._spread.parts

    def scaler_state(self) -> dict[str, float]:
        return self._precision.state()

    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        """Load a checkpoint of step `step`: allocate state for the saved tensors, read in place, fill the optimizers.

        `saved`: names, shapes and dtypes in the checkpoint, which any layout may have written.
        """
        self._spread.settle()
        to_fill = OptimizerToFill(self.optimizer, *self._optimized(), saved)
        average = {} if self._average is None else self._average.to_fill(saved, self._spread.parts)
        read({**model_pieces(self.model, self._spread.parts), **to_fill.pieces, **average})
        to_fill.fill()
        self._precision.restore(scaler)
        self._advance_schedule(step)

    def _advance_schedule(self, step: int) -> None:
        """Set the rates of the next step after `step` of them."""
        if self.schedule is not None and step:
            # A schedule is a function of the step: taking the last one again sets the rates of the next.
            take_step(self.schedule, step)


def _terms(loss: TaskLoss, totals: Tensor) -> dict[str, Tensor]:
    """The terms of a loss by name, each its sum / its count over all ranks, without its weight."""
    if not loss.weights:
        return {}
    sums, counts = totals[2:].chunk(2)
    return dict(zip(loss.weights, sums / counts.clamp(min=1), strict=True))


def batch_of_turn(batch: StepBatch, turn: Turn) -> StepBatch:
    """A step's samples as the model is called with them in a turn."""
    in_turn = [
        replace(micro_batch, batch=micro_batch.batch._replace(inputs=InTurn(micro_batch.batch.inputs, turn.name)))
        for micro_batch in batch.micro_batches
    ]
    return replace(batch, micro_batches=in_turn)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and factors for tensors of a dtype: float32 for 16-bit ones, which would lose precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors by device and dtype, as PyTorch's foreach operators require."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from kinds.values()
