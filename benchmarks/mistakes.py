"""Effects of the classic mistakes of distributed training on a step, each injected and compared with one process.

    python benchmarks/mistakes.py [--json FILE]

Most are injected into the native engine, and `samestep.verify` compares the first steps on two processes with those
of one. The mistake in evaluation, which is not part of an engine, is made with PyTorch's own sampler, on a model of
the task.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import samestep
from samestep.data.loader import StepBatch
from samestep.engines.base import Loss, StepReport
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.setup import TrainerSetup

BATCH = 33  # 17 samples for one rank and 16 for the other
STEPS = 5
SGD = samestep.SGD(lr=0.1)
ADAMW = samestep.AdamW(lr=0.01)


class Phrases(samestep.Task):
    """Points in three classes; each stands for a phrase of 1 to 8 words, and its weight is the number of words."""

    def __init__(self, *, words: bool = False, held_out: int = 101) -> None:
        generator = torch.Generator().manual_seed(7)
        size = 200 + held_out
        labels = torch.randint(3, (size,), generator=generator)
        lengths = torch.randint(1, 9, (size,), generator=generator) if words else torch.ones(size, dtype=torch.int64)
        points = torch.randn(size, 4, generator=generator)  # [size, 4]
        points[:, 0] += labels
        pairs = list(zip(points, torch.stack([labels, lengths], dim=1), strict=True))
        self.train, self.held_out = pairs[:200], pairs[200:]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))

    def train_set(self) -> samestep.Samples:
        return self.train

    def eval_set(self) -> samestep.Samples:
        return self.held_out

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        labels, words = batch.targets.unbind(dim=1)
        return (nn.functional.cross_entropy(output, labels, reduction="none") * words).sum(), words.sum()

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output, batch.targets[:, 0]

    def metrics(self) -> dict[str, MulticlassAccuracy]:
        return {"accuracy": MulticlassAccuracy(num_classes=3, average="micro")}


class SummedTrainer(NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * dist.get_world_size()


class MeanTrainer(NativeTrainer):
    """Returns a mean instead of a sum and a count, as `loss.mean()` under plain data parallelism does."""

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        def mean(output: Any, part: samestep.Batch) -> tuple[Tensor, int]:
            total, count = loss(output, part)
            return total / count, 1

        return super().step(batch, mean)


class PaddedTrainer(NativeTrainer):
    """Repeats a sample on a rank that has one less than the others, as a padded sampler does."""

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        ranks = dist.get_world_size()
        padded = -(-batch.global_samples // ranks)
        (part,) = batch.micro_batches
        if batch.local_samples < padded:
            repeated = samestep.Batch(*(torch.cat([values, values[:1]]) for values in part.batch))
            part = replace(part, batch=repeated, samples=padded)
        return super().step(replace(batch, micro_batches=[part], global_samples=padded * ranks), loss)


class OtherWeightsTrainer(NativeTrainer):
    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(self.model.parameters())[0].add_(1e-6)


class ForgottenScheduleTrainer(NativeTrainer):
    def update(self) -> None:
        self.optimizer.step()


class UndividedTrainer(NativeTrainer):
    """Adds up the means of micro-batches without dividing by their number."""

    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * len(batch.micro_batches)


class Mistaken(Native):
    """The native engine with another trainer. A class instead of a closure, since it is pickled for the ranks."""

    def __init__(self, trainer: type[NativeTrainer]) -> None:
        self.trainer_class = trainer


@dataclass(frozen=True, kw_only=True)
class Planted:
    """An injected mistake, and the job in which it shows."""

    name: str
    trainer: type[NativeTrainer]
    words: bool = False  # the loss counts words, not samples
    micro_batch: int | None = None
    optimizer: samestep.SGD | samestep.AdamW = SGD

    def differences(self) -> dict[str, float]:
        """The largest relative differences over the first steps on two processes."""
        recipe = samestep.Recipe(
            task=Phrases(words=self.words),
            batch=BATCH,
            epochs=2,
            optimizer=self.optimizer,
            schedule=samestep.Schedule(warmup=4, decay="linear"),
        )
        engine = Mistaken(self.trainer)
        proof = samestep.verify(recipe, layout="dp2", steps=STEPS, engine=engine, micro_batch=self.micro_batch)
        return dict(proof.max_relative_difference)


PLANTED = (
    Planted(name="no mistake", trainer=NativeTrainer, words=True, micro_batch=4),
    Planted(name="gradients summed", trainer=SummedTrainer),
    Planted(name="gradients summed, AdamW", trainer=SummedTrainer, optimizer=ADAMW),
    Planted(name="mean of means, 17 + 16 samples", trainer=MeanTrainer),
    Planted(name="padded sampler, 1 sample twice", trainer=PaddedTrainer),
    Planted(name="rank 1 started 1e-6 away", trainer=OtherWeightsTrainer),
    Planted(name="scheduler step forgotten", trainer=ForgottenScheduleTrainer),
    Planted(name="mean over unequal words", trainer=MeanTrainer, words=True),
    Planted(name="micro-batches: mean of means", trainer=MeanTrainer, words=True, micro_batch=4),
    Planted(name="micro-batches: never divided", trainer=UndividedTrainer, micro_batch=4),
)


def counted_twice(ranks: int = 2) -> dict[str, float]:
    """Accuracy over the samples of PyTorch's DistributedSampler, which repeats some until all ranks have as many."""
    task = Phrases()
    torch.manual_seed(0)
    model = task.model()
    held_out = TensorDataset(*(torch.stack(part) for part in zip(*task.held_out, strict=True)))
    points, targets = held_out.tensors
    right = (model(points).argmax(dim=1) == targets[:, 0]).double()
    samplers = [DistributedSampler(held_out, ranks, rank, shuffle=False) for rank in range(ranks)]
    seen = [index for sampler in samplers for index in sampler]
    once, dealt = right.mean().item(), right[seen].mean().item()
    return {"metrics": abs(dealt - once) / once}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the differences to a file")
    options = parser.parse_args()
    console = Console(stderr=True)
    rows = {}
    for mistake in PLANTED:
        with console.status(mistake.name):
            rows[mistake.name] = mistake.differences()
    rows["evaluation, 1 sample twice"] = counted_twice()

    table = Table(title=f"dp2 versus one process, {STEPS} steps: largest relative differences")
    table.add_column("mistake")
    columns = ("loss", "grad_norm", "parameters", "metrics")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{values[column]:.1e}" if column in values else "" for column in columns))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
