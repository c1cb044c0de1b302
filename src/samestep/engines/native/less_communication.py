"""The native step of replicas that send less than their gradients: `recipe.communication`.

A method of `samestep.comm.compression` says what is sent. The trainer here gives it gradients of the right weight,
and keeps what the rest of samestep relies on: losses of the whole batch, one model to evaluate, checkpoints.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.compression import METHODS
from samestep.comm.compression.base import Method, Replica
from samestep.comm.compression.wire import Wire
from samestep.communication import Communication
from samestep.data.loader import StepBatch
from samestep.engines.base import Loss, Preparation, StepReport
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_as
from samestep.errors import UserError
from samestep.parallel.ddp import GradientExchange
from samestep.parallel.holdings import Holdings
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.optimizer.spread import spread_optimizer
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import MODEL, OPTIMIZER, Box, Piece, model_pieces, optimizer_pieces, whole_piece
from samestep.parallel.unused_parameters import UnusedParameters, UnusedParametersAlone
from samestep.plugins import COMMUNICATION_PLUGINS
from samestep.torch_internals.modules import AnyBatchNorm

STATE = "communication."


def prepare(
    model: nn.Module, how: Preparation, options: Communication, failures: LayoutFailures
) -> "LessCommunicationTrainer":
    """Replicate a model over ranks that communicate by a method. Raises UserError for models that it can't train."""
    method_class = _method_class(options.kind)
    _check_model(model, method_class, options.kind)
    in_precision = Precision(how.options.precision, how.device)
    wire = Wire(how.mesh.data_group)
    hook = method_class.hook(options)
    exchange = GradientExchange(
        hook=None if hook is None else (wire, hook),
        used=(lambda _: UnusedParametersAlone()) if method_class.own_mean else partial(_UsedByAny, wire=wire),
    )
    spread_model = spread_as(model, how, in_precision, exchange=exchange)
    optimizer = spread_optimizer(
        how.optimizer_of(model.named_parameters()), how.layout, how.mesh, how.device, spread_model=spread_model
    )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    method = method_class(options, Replica(parameters=trained, optimizer=optimizer, wire=wire))
    setup = TrainerSetup.of(model, how, spread_model, optimizer, in_precision, failures=failures)
    return LessCommunicationTrainer(setup, method=method, wire=wire, hooked=hook is not None)


def _method_class(kind: str) -> type[Method]:
    """The class of a method, imported on first use. Raises UserError for one that isn't on this host."""
    if kind in METHODS:
        return resolve_name(METHODS[kind])
    method_class = COMMUNICATION_PLUGINS.load(kind, Method)
    if method_class is None:
        raise UserError(
            f"recipe.communication.kind is {kind}, whose package is not installed on this host; install it"
        )
    return method_class


def _check_model(model: nn.Module, method_class: type[Method], kind: str) -> None:
    """Raise UserError for a model that a method can't train: complex, or coupled over ranks by batch norm."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(f"recipe.communication is {kind}, and the parameter {name} is complex; leave it out")
    if not method_class.diverges:
        return
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            raise UserError(
                f"recipe.communication is {kind}, whose ranks step by themselves, and {name} "
                f"({type(module).__name__}) takes its statistics from the samples of all; use group norm, or powersgd"
            )


class LessCommunicationTrainer(NativeTrainer):
    """Steps whose gradients, momenta or parameters are exchanged by a method."""

    def __init__(self, setup: TrainerSetup, *, method: Method, wire: Wire, hooked: bool) -> None:
        """`hooked`: DistributedDataParallel exchanges the gradients through the method's communication hook."""
        super().__init__(setup)
        # DDP's message of flags has 8 bytes for each trained parameter: whether any rank used it.
        flags = 8 * len(method.replica.parameters) if hooked else 0
        self._flags_sent = 2 * flags * (wire.ranks - 1) / wire.ranks
        self._method = method
        self._wire = wire
        self._own = torch.zeros(2, dtype=torch.float64, device=self._device)  # [loss sum, count] of this rank
        self._kept: dict[str, Tensor] | None = None  # this rank's own parameters, while the model has the mean

    # The step.

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Take a step; the report includes the bytes that this rank sent for the method and the loss."""
        self._put_back()
        before = self._wire.sent
        report = super().step(batch, loss)
        return replace(report, sent=round(self._wire.sent - before + self._flags_sent))

    def gradient_scale(self, batch: StepBatch) -> float:
        """1 / own samples for a method with `own_mean`; otherwise as in `NativeTrainer`."""
        if self._method.own_mean:
            return 1 / max(1, batch.local_samples)
        return super().gradient_scale(batch)

    def sum_totals(self, totals: Tensor) -> dist.Work | None:
        """Keep this rank's [loss sum, count], which weights its part in means, then sum them over the ranks."""
        self._own.copy_(totals)
        if self._method.own_mean:
            return None  # summed along with the norms, after backward
        return self._wire.sum(totals, asynchronous=True)

    def scale_and_clip(self, batch: StepBatch, totals: Tensor) -> Tensor:
        """Turn gradients into means over terms, exchange them, and clip the gradient that this rank steps with.

        The returned norm is the same on every rank: that of the common gradient, or the root of the weighted mean of
        the ranks' squared norms.
        """
        samples_to_terms = batch.global_samples / totals[1]
        if self._method.own_mean:
            samples_to_terms = max(1, batch.local_samples) / self._own[1].clamp(min=1)
        self._multiply(samples_to_terms)
        whole = self._method.exchange()
        norm = self._gradient_norm()
        if self._clip is not None:
            self._multiply(torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        if whole:
            return norm
        weight = self._own[1] if self._method.own_mean else torch.ones_like(norm)
        sums = torch.stack([self._own[0], self._own[1], weight, weight * norm.square()])
        self._wire.sum(sums)
        totals.copy_(sums[:2])
        totals[1].clamp_(min=1)
        return (sums[3] / sums[2].clamp(min=1)).sqrt()

    def _multiply(self, coefficient: Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient.to(parameter.grad))

    def update(self) -> None:
        """Let the method step, weighted by the number of this rank's loss terms in this step."""
        self._method.update(float(self._own[1]))
        if self.schedule is not None:
            with warnings.catch_warnings():  # the schedule expects `optimizer.step()`, which a method may replace
                warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)`")
                self.schedule.step()

    # The mean of the ranks' models, which is evaluated and exported.

    def predict(self, inputs: Any) -> Any:
        """Run the mean of the ranks' models, which may differ between exchanges."""
        self._look_at_all()
        return super().predict(inputs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of the mean of the ranks' models."""
        self._look_at_all()
        return super().parameters()

    def _whole_state(self, *, kept: bool) -> dict[str, Tensor]:
        self._look_at_all()
        return super()._whole_state(kept=kept)

    def _look_at_all(self) -> None:
        """Replace this rank's parameters by the ranks' mean until the next step; every rank asks."""
        if self._kept is not None or self._method.alike:
            return
        sent = self._wire.sent
        mean = self._method.averaged()
        self._wire.sent = sent  # messages of evaluations don't count as a step's
        self._kept = {}
        for name, parameter in self._method.replica.parameters.items():
            self._kept[name] = parameter.detach().clone()
            parameter.detach().copy_(mean[name])

    def _put_back(self) -> None:
        """Restore this rank's own parameters if they are replaced by the mean."""
        kept, self._kept = self._kept, None
        if kept is not None:
            for name, parameter in self._method.replica.parameters.items():
                parameter.detach().copy_(kept[name])

    def holdings(self) -> Holdings:
        """Add the method's state to what the trainer holds."""
        held = super().holdings()
        ranges = [range_.values for range_ in self._method.ranges().values()]
        state = [*self._method.shared().values(), *self._method.own().values(), *ranges]
        return replace(held, optimizer_state=[*held.optimizer_state, *state])

    # Checkpoints: `model.` is the mean of the ranks' models; a method that diverges also saves each rank's own.

    def pieces(self) -> dict[str, Piece]:
        """The mean of the ranks' models under the usual names, and the state that is needed to resume.

        `method...`: the method's state that all ranks share. Under a prefix for each rank: its own method state, and
        for a method that diverges its own parameters and optimizer state.
        """
        self._look_at_all()
        model = model_pieces(self.model, self._spread.parts)
        if self._kept is not None:  # they are copied before the parameters change again
            model = {name: _copied(piece) for name, piece in model.items()}
        self._put_back()
        optimizer = optimizer_pieces(self.optimizer, self.model, self._spread.parts)
        method = self._method
        pieces = {**model, **{STATE + name: whole_piece(value) for name, value in method.shared().items()}}
        pieces |= {STATE + name: _range_piece(range_) for name, range_ in method.ranges().items()}
        own = self._own_prefix(self._wire.rank)
        pieces |= {own + name: whole_piece(value) for name, value in method.own().items()}
        if not method.diverges:
            return {**pieces, **optimizer}
        pieces |= {own + name: piece for name, piece in optimizer.items()}
        for name, parameter in method.replica.parameters.items():
            pieces[own + MODEL + name] = whole_piece(parameter.detach())
        return pieces

    def _own_prefix(self, rank: int) -> str:
        return f"{STATE}rank{rank}."

    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        """Load a checkpoint, with this rank's own state from that of an old rank.

        With the same number of ranks each continues from its own state. With another number all begin with the mean
        model, rank r takes the optimizer state of old rank r modulo the old number, and residuals are redistributed
        (`_Dealt`).
        """
        before = _ranks_in(saved)
        own = self._own_prefix(self._wire.rank % before if before else 0)
        by_usual_names = {name.removeprefix(own): entry for name, entry in saved.items() if name.startswith(own)}
        trained = self._method.replica.parameters
        dealt = _Dealt(self._method, before=before, prefix=self._own_prefix)

        def read_all(pieces: Mapping[str, Piece]) -> None:
            method = self._method
            more = {STATE + name: whole_piece(value) for name, value in method.shared().items()}
            more |= {STATE + name: _range_piece(range_) for name, range_ in method.ranges().items()}
            if method.diverges:
                # The rank's own optimizer state; its own parameters only if the number of ranks is unchanged.
                own_names = {MODEL + name for name in trained} if before == self._wire.ranks else set[str]()
                own_names |= {name for name in pieces if name.startswith(OPTIMIZER)}
                pieces = {own + name if name in own_names else name: piece for name, piece in pieces.items()}
            read({**pieces, **more, **dealt.pieces})

        super().restore(step, by_usual_names if self._method.diverges else saved, read_all, scaler)
        dealt.fill()


class _Dealt:
    """Redistributes a method's per-rank state from the ranks that saved it to the present ones."""

    def __init__(self, method: Method, *, before: int, prefix: Callable[[int], str]) -> None:
        """`before`: the number of ranks that saved the state."""
        ranks, rank = method.replica.wire.ranks, method.replica.wire.rank
        self._factor = ranks / before if before else 1.0
        self._parts = {
            name: [torch.zeros_like(value) for _ in range(rank, before, ranks)]
            for name, value in method.own().items()
        }
        self._own = method.own()
        self.pieces = {
            f"{prefix(old)}{name}": whole_piece(part)
            for name, parts in self._parts.items()
            for old, part in zip(range(rank, before, ranks), parts, strict=True)
        }

    def fill(self) -> None:
        """Sum the old states assigned to this rank, times new ranks / old ranks, which keeps the ranks' mean."""
        for name, value in self._own.items():
            value.zero_()
            for part in self._parts[name]:
                value.add_(part, alpha=self._factor)


def _ranks_in(saved: Mapping[str, Entry]) -> int:
    """The number of ranks with state of their own in a checkpoint."""
    start = f"{STATE}rank"
    return len({name.removeprefix(start).partition(".")[0] for name in saved if name.startswith(start)})


def _copied(piece: Piece) -> Piece:
    return replace(piece, boxes=[replace(box, values=box.values.clone()) for box in piece.boxes])


def _range_piece(held: Any) -> Piece:
    """The piece of a flat tensor that is sharded over the ranks."""
    boxes = [Box(offsets=(held.start,), values=held.values)] if held.values.numel() else []
    return Piece(shape=torch.Size([held.whole]), dtype=held.values.dtype, boxes=boxes)


class _UsedByAny(UnusedParameters):
    """Gives a zero gradient to parameters that only other ranks used; those that no rank used keep None."""

    def __init__(self, model: nn.Module, *, wire: Wire) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._wire = wire

    def reach(self, loss: Tensor) -> Tensor:
        return loss

    def settle(self) -> None:
        """Give parameters that only other ranks used a zero gradient, so that all ranks exchange the same ones."""
        flags = [parameter.grad is not None for parameter in self._parameters]
        used = torch.tensor(flags, dtype=torch.uint8, device=self._parameters[0].device)
        self._wire.largest(used)
        for parameter, any_used in zip(self._parameters, used.tolist(), strict=True):
            if any_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
