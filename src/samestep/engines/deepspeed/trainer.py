"""The trainer on a DeepSpeed engine: its backward, ZeRO, clipping and optimizer, and the loss of one process."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch, StepBatch, to_device
from samestep.engines.base import Loss, StepReport, Trainer
from samestep.engines.deepspeed import shards
from samestep.engines.deepspeed.start import quietly, without_deprecations
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.parallel.buffers import check_buffers, versions
from samestep.parallel.holdings import Holdings
from samestep.parallel.moment import Now
from samestep.parallel.used import UsedByReplicas
from samestep.tasks.base import call, sum_and_count


class Gradients(ABC):
    """Where a stage keeps the step's gradient, which must be multiplied once the count of terms is known.

    Backward starts before the ranks have counted their terms (unmasked tokens, say), so it leaves sum / samples.
    """

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, times the scale for fp16 where DeepSpeed's backward leaves that to others."""
        return loss

    @abstractmethod
    def settle(self, factor: float) -> None:
        """Multiply the gradient, after the last backward and before the step. Raises UserError for what can't be."""

    @abstractmethod
    def norm_after_step(self) -> float | Tensor:
        """The whole gradient's norm as it was before clipping."""


class WholeGradients(Gradients):
    """Stage 0: every rank has the whole gradient, in the parameters."""

    def __init__(self, engine: Any, group: dist.ProcessGroup) -> None:
        self._engine = engine
        self._used = UsedByReplicas(engine.module, group)
        self._norm = torch.zeros(())

    def scaled(self, loss: Tensor) -> Tensor:
        # DeepSpeed's engine scales for ZeRO alone (0.19), yet its optimizer for stage 0 divides by the scale as well.
        scale = _loss_scale(self._engine)
        return loss if scale == 1 else loss.float() * scale

    def settle(self, factor: float) -> None:
        self._used.settle()
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])
        self._norm = torch.stack(norms).double().square().sum().sqrt() / _loss_scale(self._engine)

    def norm_after_step(self) -> Tensor:
        return self._norm


class ShardedGradients(Gradients):
    """Stages 1 to 3: DeepSpeed keeps shards of it, and divides them by the scale of the loss when it steps.

    That scale is one over the factor then, times the one that fp16 was scaled by.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._reached = 0
        self._trained = [p for p in engine.module.parameters() if p.requires_grad]
        self._seen: set[int] = set()
        for number, parameter in enumerate(self._trained):
            parameter.register_hook(self._note(number))

    def _note(self, number: int) -> Any:
        def note(gradient: Tensor) -> None:
            self._seen.add(number)

        return note

    def unused(self) -> int:
        """How many parameters this rank's backward did not reach in this step."""
        missing = len(self._trained) - len(self._seen)
        self._seen.clear()
        return missing

    def settle(self, factor: float) -> None:
        optimizer = self._engine.optimizer
        scale = _loss_scale(self._engine)
        if factor != 1 or scale != 1:
            optimizer.override_loss_scale(scale / factor)

    def norm_after_step(self) -> float | Tensor:
        self._engine.optimizer.custom_loss_scaler = False
        return self._engine.get_global_grad_norm()


class DeepSpeedTrainer(Trainer):
    """Takes steps with a DeepSpeed engine, and saves and loads its checkpoints."""

    def __init__(
        self,
        *,
        engine: Any,
        package: Any,
        model: nn.Module,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        now: Now,
    ) -> None:
        self.engine = engine
        self.model = model
        self._package = package
        self._layout = layout
        self._mesh = mesh
        self._device = device
        self._now = now
        self._dtype = _compute_dtype(engine)
        self._whole_dtype = torch.float32
        self._gradients: Gradients = (
            ShardedGradients(engine) if engine.zero_optimization() else WholeGradients(engine, mesh.data_group)
        )
        self._buffers_checked = False

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        if not self.model.training:
            self.engine.train()
        with without_deprecations():
            totals = self._backward(batch, loss)
            return self._update(batch, totals)

    def _update(self, batch: StepBatch, totals: Tensor) -> StepReport:
        """Let DeepSpeed clip, step the optimizer and advance the schedule."""
        lr = self.engine.get_lr()[0]
        # What DeepSpeed counts samples by, for its monitors. It counts whole batches, and the last may be shorter.
        before = self.engine.global_samples
        self.engine.step()
        self.engine.global_samples = before + batch.global_samples
        norm = self._gradients.norm_after_step()
        return StepReport(
            loss=totals[0] / totals[1],
            grad_norm=torch.as_tensor(norm, dtype=torch.float64, device=self._device),
            lr=lr,
        )

    def _backward(self, batch: StepBatch, loss: Loss) -> Tensor:
        """Leave the step's gradient in the engine; return [loss sum, count] over all ranks."""
        # [loss sum, count, parameters that a rank did not use]
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        before = {} if self._buffers_checked else versions(self.model)
        # The average over the data ranks is then sum / samples; samples are known before any message is sent.
        scale = self._mesh.data_place.of / batch.global_samples
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            self.engine.set_gradient_accumulation_boundary(number == len(batch.micro_batches))
            loss_sum, count = self._forward(micro_batch, loss)
            totals[0] += loss_sum.detach() * micro_batch.weight
            totals[1] += count * micro_batch.weight
            weighed = loss_sum * (micro_batch.weight * scale)
            self.engine.backward(self._gradients.scaled(weighed), scale_wrt_gas=False)
        if isinstance(self._gradients, ShardedGradients):
            totals[2] = self._gradients.unused()
        dist.all_reduce(totals, group=self._mesh.loss_group)
        if not self._buffers_checked:
            self._buffers_checked = True
            check_buffers(self.model, before, self._mesh.data_group)
        if totals[2]:
            raise UserError(
                f"engine deepspeed: a step left {int(totals[2])} parameters (counted over all ranks) unused, and "
                "ZeRO takes their gradient for zero, by which AdamW still moves them; layout dp, or a model that "
                "uses all its parameters in every step, would do"
            )
        # A batch without a term (every token masked) has a gradient of zero; 0 / 0 would make weights of NaN.
        totals[1].clamp_(min=1)
        self._gradients.settle(batch.global_samples / totals[1].item())
        return totals[:2]

    def _forward(self, micro_batch: MicroBatch, loss: Loss) -> tuple[Tensor, Tensor | int]:
        with self._now.at(micro_batch.moment):
            output = call(self.engine, self._as_computed(micro_batch.batch.inputs))
            with self._autocast():
                return sum_and_count(loss(output, micro_batch.batch))

    def _autocast(self) -> torch.autocast:
        """For the loss of a model in low precision: PyTorch knows which operators want float32."""
        low = self._dtype != torch.float32
        return torch.autocast(self._device.type, self._dtype if low else None, enabled=low)

    def _as_computed(self, inputs: Any) -> Any:
        return inputs if self._dtype == torch.float32 else to_device(inputs, self._device, self._dtype)

    def predict(self, inputs: Any) -> Any:
        if self.model.training:
            self.engine.eval()
        with torch.no_grad(), without_deprecations():
            return call(self.engine.module, self._as_computed(inputs))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return shards.whole_parameters(self.model, self._package, self._whole_dtype)

    def state(self) -> dict[str, Tensor]:
        return shards.whole_state(self.model, self._package, self._whole_dtype)

    def holdings(self) -> Holdings:
        offloads = bool(self.engine.zero_use_cpu_optimizer() or self.engine.zero_nvme_offload_optimizer())
        return shards.holdings(self.model, self.engine, self._layout, offloads_optimizer=offloads)

    def save_checkpoint(
        self, folder: str | Path, *, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> None:
        """Write DeepSpeed's checkpoint into a folder, with whatever else is to come back; every rank must call."""
        with quietly(self._device):
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=dict(client_state or {}))

    def load_checkpoint(self, folder: str | Path, *, tag: str | None = None) -> dict[str, Any]:
        """Go on from a checkpoint: the latest, or the one of a tag. Returns its client state. Every rank must call.

        Raises UserError where there is none.
        """
        named = Path(folder) / tag if tag is not None else Path(folder) / "latest"
        if not named.exists():
            raise UserError(
                f"{folder} holds no DeepSpeed checkpoint{f' {tag}' if tag else ''} ({named} is missing); "
                "a folder that save_checkpoint wrote would do"
            )
        with quietly(self._device):
            _, client_state = self.engine.load_checkpoint(str(folder), tag=tag)
        return client_state or {}


def _compute_dtype(engine: Any) -> torch.dtype:
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def _loss_scale(engine: Any) -> float:
    """What DeepSpeed multiplied the loss by, so that small gradients don't vanish in fp16."""
    scale = engine._get_optimizer_loss_scale()
    return 1.0 if scale is None else float(scale)


def trained(model: nn.Module) -> Sequence[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
