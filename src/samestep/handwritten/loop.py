"""A training loop in plain PyTorch, as an expert would write it: one process or DistributedDataParallel.

It shares with samestep what is not compared: the job's task, its initial weights, the order of samples, the
optimizer's groups and schedule, and the metrics. How ranks share the work is written here, with PyTorch's own parts.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from samestep.data.loader import on_device
from samestep.data.order import DataPlace, SampleOrder, bounds
from samestep.data.sample_draws import EpochIndices, SeededSamples
from samestep.data.types import Batch, as_batch
from samestep.engines.precision import parameter_dtype
from samestep.errors import UserError
from samestep.handwritten import PRECISIONS
from samestep.layout import Layout
from samestep.parallel.deferred_init import move
from samestep.parallel.exact.float64 import in_float64
from samestep.parallel.holdings import Holdings, holdings
from samestep.recipe import Recipe
from samestep.tasks.base import Task, call, sum_and_count
from samestep.tasks.losses import takes_gather
from samestep.tasks.turns import turns_of
from samestep.torch_internals.modules import AnyBatchNorm
from samestep.training.evaluation import apart, named_parts, plain, switch_off
from samestep.training.fit import build_model
from samestep.training.optimizer import OptimizerPlan
from samestep.training.schedule import make_schedule


class LocalMicroBatch(NamedTuple):
    """A micro-batch of this rank, and its weight: 0.0 for another rank's samples."""

    batch: Batch
    weight: float


class StepResult(NamedTuple):
    """Results of one step over all ranks."""

    loss: Tensor
    grad_norm: Tensor  # before clipping
    lr: float


class Loop:
    """Trains a recipe on one rank of `world_size`; with several ranks in an existing process group."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device,
        micro_batch: int | None = None,
        workers: int = 0,
        compile: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the group of all ranks; None: the default group."""
        if recipe.precision not in PRECISIONS:
            raise UserError(
                f"recipe.precision is {recipe.precision}; handwritten methods have {', '.join(PRECISIONS)}"
            )
        if recipe.master_weights:
            raise UserError("handwritten methods keep parameters in float32; use a recipe without master_weights")
        if not recipe.attention_dropout:
            raise UserError(
                "handwritten methods drop what the model says; use a recipe without attention_dropout: false"
            )
        if task.loss_weights or turns_of(task):
            raise UserError(
                "handwritten methods have one loss of one count; use a task without loss_weights or turns"
            )
        if takes_gather(task.loss):
            raise UserError(
                "the loss takes gather, for the rows of the whole batch, which handwritten methods have not"
            )
        self.recipe, self.task = recipe, task
        self.place, self.device = DataPlace(index=rank, of=world_size), device
        self._micro_batch, self._workers, self._group = micro_batch, workers, group
        self._dtype = parameter_dtype(recipe.precision)
        self.samples = task.train_set()
        self.order = SampleOrder(size=len(self.samples), batch=recipe.batch, seed=recipe.seed)
        self.total_steps = recipe.total_steps(self.order.steps_per_epoch)
        self.model = self._build()
        self._replicas = self._replicate(self.model)
        # PyTorch's advice for DistributedDataParallel: compile what it returns, so that graphs break between buckets.
        self.module = torch.compile(self._replicas) if compile else self._replicas
        self.optimizer = OptimizerPlan(recipe, self.model)(self.model.named_parameters())
        self.schedule = make_schedule(recipe.schedule, self.total_steps, self.optimizer)
        torch.manual_seed(recipe.seed + rank)  # different dropout on every rank

    def _build(self) -> nn.Module:
        """Build the task's model on the device, in the recipe's dtype."""
        model = build_model(self.task, self.recipe).model
        if not self.recipe.dropout:
            switch_off(model)
        move(model, self.device, self._dtype)
        return model.train()

    def _replicate(self, model: nn.Module) -> nn.Module:
        """DistributedDataParallel, with SyncBatchNorm for batch norm; plain for one process."""
        if self.place.of == 1:
            return model
        if any(isinstance(module, AnyBatchNorm) for module in model.modules()):
            if self.device.type == "cpu":
                raise UserError(
                    "the model has batch norm, whose statistics PyTorch's SyncBatchNorm shares between accelerators "
                    "only; on CPUs each rank's samples alone would make another step; use a layout of samestep"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, process_group=self._group
        )

    def batches(self) -> Iterator[tuple[list[LocalMicroBatch], float]]:
        """Yield this rank's micro-batches of every step, and the seconds that it waited for data."""
        shares = [self.order.shares(step, self.place, self._micro_batch) for step in range(self.total_steps)]
        loader = iter(
            DataLoader(
                SeededSamples(self.samples, self.recipe.seed),  # pyright: ignore[reportArgumentType]
                batch_sampler=[
                    EpochIndices(share.samples.tolist(), self.order.epoch_of(step))
                    for step, cut in enumerate(shares)
                    for share in cut
                ],
                collate_fn=self.task.collate,
                num_workers=self._workers,
                pin_memory=self.device.type != "cpu",
                generator=torch.Generator().manual_seed(0),
            )
        )
        for step in shares:
            began = time.perf_counter()
            loaded = [next(loader) for _ in step]
            seconds = time.perf_counter() - began
            parts = [
                LocalMicroBatch(self._on_device(batch), 0.0 if share.zero_weight else 1.0)
                for share, batch in zip(step, loaded, strict=True)
            ]
            yield parts, seconds

    def _on_device(self, batch: Any) -> Batch:
        return on_device(as_batch(batch), self.device, self._dtype)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16")

    def _throughout(self) -> AbstractContextManager[None]:
        return in_float64(self.recipe.precision == "fp64")

    def step(self, parts: list[LocalMicroBatch], global_samples: int) -> StepResult:
        """Forward and backward of every micro-batch, then one update.

        DistributedDataParallel averages the ranks' gradients, so a rank's sum is scaled by ranks / samples; the
        average is then the sum over the global batch / its samples, also where ranks have unlike numbers of them.
        """
        self.optimizer.zero_grad()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, terms
        scale = self.place.of / global_samples
        sending = None
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with nullcontext() if last or self.place.of == 1 else self._without_messages(), self._throughout():
                with self._autocast():
                    output = call(self.module, part.batch.inputs)
                    loss, terms = sum_and_count(self.task.loss(output, part.batch))
                totals[0] += loss.detach() * part.weight
                totals[1] += terms * part.weight
                if last and self.place.of > 1:
                    sending = dist.all_reduce(totals, group=self._group, async_op=True)
                (loss * (part.weight * scale)).backward()
        if sending is not None:
            sending.wait()
        return self._update(totals, global_samples)

    def _without_messages(self) -> Any:
        """All micro-batches but the last add up locally."""
        assert isinstance(self._replicas, DistributedDataParallel)
        return self._replicas.no_sync()

    def _update(self, totals: Tensor, global_samples: int) -> StepResult:
        """From sum / samples to sum / terms, clip, step."""
        terms = totals[1].clamp(min=1)
        if terms != global_samples:  # a loss over tokens: from the mean of samples to that of tokens
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_((global_samples / terms).to(parameter.grad))
        norm = clip_grad_norm_(self.model.parameters(), self.recipe.clip or float("inf"))
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        return StepResult(loss=totals[0] / terms, grad_norm=norm, lr=lr)

    def steps(self) -> Iterator[StepResult]:
        """Take the steps lazily."""
        for step, (parts, _) in enumerate(self.batches()):
            yield self.step(parts, len(self.order.global_batch(step)))

    def holdings(self) -> Holdings:
        return holdings(self.model, self.optimizer, Layout())

    def sent(self) -> dict[str, int]:
        """Bytes sent by other means than torch.distributed: none."""
        return {}

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Compute metrics of the held-out samples, each once: ranks take a slice each and gather the predictions."""
        samples = self.task.eval_set()
        if samples is None or len(samples) == 0:
            return {}
        self.model.eval()
        own = [self._scores(indices, samples) for indices in self._evaluated(len(samples))]
        self.model.train()
        metrics = self.task.metrics()
        for metric in metrics.values():
            apart(metric)  # predictions are gathered here; states need not be
        for scores in (pair for rank in self.gather(own) for pair in rank):
            for metric in metrics.values():
                metric.update(*scores)
        names = self.task.class_names()
        return {name: plain(named_parts(metric, metric.compute()), names) for name, metric in metrics.items()}

    def _evaluated(self, size: int) -> list[range]:
        """Return this rank's consecutive slice of the held-out samples, in batches."""
        start, stop = bounds(size, self.place.index, self.place.of)
        batch = self.recipe.evaluation.batch
        return [range(first, min(stop, first + batch)) for first in range(start, stop, batch)]

    def _scores(self, indices: range, samples: Any) -> tuple[Tensor, Tensor]:
        """Compute predictions and targets of some held-out samples, on the CPU."""
        held_out = SeededSamples(samples, self.recipe.seed).read(indices)
        batch = self._on_device(self.task.collate(held_out))
        with self._autocast(), self._throughout():
            output = call(self.model, batch.inputs)
        with self._autocast():
            predictions, targets = self.task.scores(output, batch)
        return predictions.cpu(), targets.cpu()

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from all ranks, by rank."""
        if self.place.of == 1:
            return [value]
        everyone: list[Any] = [None] * self.place.of
        dist.all_gather_object(everyone, value)
        return everyone
