"""The native engine: samestep's own step on torch.distributed, the same code for one rank and for many."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch, StepBatch
from samestep.engines.base import Abilities, Engine, Loss, OptimizerOf, ScheduleOf, StepReport, Trainer
from samestep.engines.precision import Precision
from samestep.layout import Layout
from samestep.parallel.apply import Spread, spread, spread_optimizer
from samestep.parallel.initial import InitialValues
from samestep.tasks.base import call, sum_and_count


class NativeTrainer(Trainer):
    """Takes steps whose gradient is the sum over the global batch / the global count, however it is cut."""

    def __init__(
        self,
        *,
        model: nn.Module,
        spread_model: Spread,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        precision: Precision,
        clip: float | None,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self._spread = spread_model
        self._precision = precision
        self._clip = clip
        self._mesh = mesh
        self._device = device

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        if not self.model.training:
            self.model.train()
        self.optimizer.zero_grad()
        totals = self.backward(batch, loss)
        grad_norm = self.scale_and_clip(batch, totals)
        lr = self.optimizer.param_groups[0]["lr"]
        self.update()
        return StepReport(loss=totals[0] / totals[1], grad_norm=grad_norm, lr=lr)

    def backward(self, batch: StepBatch, loss: Loss) -> Tensor:
        """Leave sum over the global batch / its samples in the gradients; return [loss sum, count] over all ranks."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        *first, last = batch.micro_batches
        for micro_batch in first:
            with self._spread.accumulating():
                self._precision.backward(self._forward(micro_batch, loss, totals) * self.gradient_scale(batch))
        loss_sum = self._forward(last, loss, totals)
        # Two numbers, on their way while backward runs.
        pending = dist.all_reduce(totals, group=self._mesh.data_group, async_op=True)
        self._precision.backward(loss_sum * self.gradient_scale(batch))
        if pending is not None:
            pending.wait()
        # A batch without a term (every token masked) has a gradient of zero; 0 / 0 would make weights of NaN.
        totals[1].clamp_(min=1)
        return totals

    def _forward(self, micro_batch: MicroBatch, loss: Loss, totals: Tensor) -> Tensor:
        with self._precision.autocast():
            output = call(self._spread.module, micro_batch.batch.inputs)
            loss_sum, count = sum_and_count(loss(output, micro_batch.batch))
        totals[0] += loss_sum.detach() * micro_batch.weight
        totals[1] += count * micro_batch.weight
        return loss_sum * micro_batch.weight

    def gradient_scale(self, batch: StepBatch) -> float:
        """What a rank's loss sum is multiplied by, so that the average over the data ranks is sum / samples.

        Samples are known before any message is sent; the count of terms is known only after.
        """
        return self._mesh.data_place.of / batch.global_samples

    def scale_and_clip(self, batch: StepBatch, totals: Tensor) -> Tensor:
        """Turn sum / samples into sum / count, clip the whole gradient's norm, and return it as it was before."""
        self._precision.unscale(self.optimizer)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        samples_to_terms = batch.global_samples / totals[1]
        norm = whole(get_total_norm(gradients)).double() * samples_to_terms
        coefficient = samples_to_terms
        if self._clip is not None:
            coefficient = coefficient * torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        # Asking for the value would make an accelerator wait; on a CPU it saves a pass over the gradients.
        if self._device.type != "cpu" or coefficient != 1:
            torch._foreach_mul_([local(gradient) for gradient in gradients], coefficient.to(gradients[0].dtype))
        return norm

    def update(self) -> None:
        """Step the optimizer and the schedule."""
        self._precision.update(self.optimizer)
        if self.schedule is not None:
            self.schedule.step()

    def predict(self, inputs: Any) -> Any:
        if self.model.training:
            self.model.eval()
        with torch.no_grad(), self._precision.autocast():
            return call(self.model, inputs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, whole(parameter.detach())

    def state(self) -> dict[str, Tensor]:
        return {name: whole(value.detach()).cpu() for name, value in self.model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from the ranks that hold its shards; every one of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Native(Engine):
    """Layouts by PyTorch's own parts, optimizer and step by samestep."""

    name = "native"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset({"replicate", "shard"}),
        precisions=frozenset({"fp64", "fp32", "bf16", "fp16"}),
        recompute=frozenset({"none", "selective", "full"}),
        offload=frozenset({"none", "parameters"}),
        fills=True,
    )
    trainer_class: type[NativeTrainer] = NativeTrainer

    def prepare(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        precision: str,
        clip: float | None,
        optimizer_of: OptimizerOf,
        schedule_of: ScheduleOf,
        initial: InitialValues | None = None,
    ) -> NativeTrainer:
        spread_model = spread(model, layout, mesh, device, precision, initial)
        optimizer = spread_optimizer(optimizer_of(model.named_parameters()), layout, mesh)
        return self.trainer_class(
            model=model,
            spread_model=spread_model,
            optimizer=optimizer,
            schedule=schedule_of(optimizer),
            precision=Precision(precision, device),
            clip=clip,
            mesh=mesh,
            device=device,
        )
