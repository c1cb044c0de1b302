"""Code that the peers share: a job's task, initial weights, order of samples, metrics, and the files of a run."""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from samestep.data.order import DataPlace, SampleOrder, bounds
from samestep.data.types import Batch
from samestep.launch.device import peak_memory
from samestep.recipe import Recipe
from samestep.run_folder import versions
from samestep.tasks.base import Task, call
from samestep.tasks.registry import resolve
from samestep.training.evaluation import apart, named_parts, plain, switch_off
from samestep.training.fit import build_model
from samestep.training.optimizer import OptimizerPlan
from samestep.training.result import is_curve
from samestep.training.schedule import make_schedule


def arguments(description: str | None) -> tuple[Path, Path]:
    """The job file and the run's folder, from the command line."""
    parser = ArgumentParser(description=description)
    parser.add_argument("job", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the run's files go")
    options = parser.parse_args()
    return options.job, options.folder


class PeerJob:
    """A job on one rank, in float32 or bf16 autocast."""

    def __init__(self, recipe: Recipe, rank: int, world_size: int, *, task: Task | None = None) -> None:
        self.recipe = recipe
        if self.recipe.precision not in ("fp32", "bf16"):
            raise SystemExit(f"recipe.precision is {self.recipe.precision}; peers have fp32 and bf16")
        self.task = task or resolve(recipe)
        self.place = DataPlace(index=rank, of=world_size)
        self.samples = self.task.train_set()
        self.order = SampleOrder(size=len(self.samples), batch=self.recipe.batch, seed=self.recipe.seed)
        self.total_steps = self.recipe.total_steps(self.order.steps_per_epoch)
        self.model = build_model(self.task, self.recipe).model
        if not self.recipe.dropout:
            switch_off(self.model)
        self.optimizer = OptimizerPlan(self.recipe, self.model)(self.model.named_parameters())
        self.schedule = make_schedule(self.recipe.schedule, self.total_steps, self.optimizer)
        self.losses: list[float] = []
        self._total = torch.zeros((), dtype=torch.float64)
        self._sending: dist.Work | None = None
        self._moments: list[float] = []  # the times of the start, of each step's known loss, and of the end
        torch.manual_seed(self.recipe.seed + rank)  # dropout draws different numbers on every rank

    def loader(self, collate: Callable[[Any], Any] | None = None) -> DataLoader[Any]:
        """A loader of this rank's slice of every global batch, in order."""
        steps = (self.order.shares(step, self.place, None)[0] for step in range(self.total_steps))
        return DataLoader(
            self.samples,  # pyright: ignore[reportArgumentType]  (a length and an index are all it needs)
            batch_sampler=[share.samples.tolist() for share in steps],
            collate_fn=collate or self.task.collate,
            generator=torch.Generator().manual_seed(0),
        )

    def begin(self) -> None:
        """Record the start of the training."""
        self._moments = [time.perf_counter()]

    def finish(self) -> None:
        """Record the end of the training, before evaluation."""
        self._moments[-1] = time.perf_counter()  # the last step ends here

    def global_samples(self, step: int) -> int:
        return len(self.order.global_batch(step))

    def count(self, terms: int | Tensor, batch: Batch, samples: int) -> float:
        """The number of terms in a global batch of `samples` samples, if each has as many as in this rank's batch."""
        each, rest = divmod(int(terms), len(batch.targets))
        if rest:
            raise SystemExit("the samples of this job have unlike numbers of loss terms, which the peers don't weigh")
        return each * samples

    def send_loss(self, loss: Tensor) -> None:
        """Start the all-reduce of the loss that this rank has summed over its samples; it overlaps backward."""
        self._total = loss.detach().double().clone()
        if self.place.of > 1:
            self._sending = dist.all_reduce(self._total, async_op=True)

    def note_loss(self, terms: float) -> float:
        """Wait for `send_loss`'s all-reduce; records and returns the mean loss over the global batch's terms."""
        if self._sending is not None:
            self._sending.wait()
        self.losses.append(self._total.item() / terms)
        self._moments.append(time.perf_counter())
        return self.losses[-1]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device, autocast: Callable[[], Any]) -> dict[str, Any]:
        """Evaluate the metrics of the held-out samples, each once."""
        samples = self.task.eval_set()
        if samples is None or len(samples) == 0:
            return {}
        model.eval()
        mine = []
        for indices in self._evaluated(len(samples)):
            batch = Batch(*_moved(self.task.collate([samples[index] for index in indices]), device))
            with autocast():
                scores = self.task.scores(call(model, batch.inputs), batch)
            mine.append(tuple(part.float().cpu() if part.is_floating_point() else part.cpu() for part in scores))
        everyone: list[Any] = [mine]
        if self.place.of > 1:
            everyone = [None] * self.place.of
            dist.all_gather_object(everyone, mine)
        metrics = self.task.metrics()
        for metric in metrics.values():
            apart(metric)  # predictions are gathered here, so states need not be
            for predictions, targets in (pair for rank in everyone for pair in rank):
                metric.update(predictions, targets)
        names = self.task.class_names()
        return {name: plain(named_parts(metric, metric.compute()), names) for name, metric in metrics.items()}

    def _evaluated(self, size: int) -> Iterator[range]:
        start, stop = bounds(size, self.place.index, self.place.of)
        batch = self.recipe.evaluation.batch
        return (range(first, min(stop, first + batch)) for first in range(start, stop, batch))

    def write(self, folder: Path, *, engine: str, metrics: dict[str, Any], device: torch.device) -> None:
        """Write report.json and metrics.jsonl in the format of samestep's runs; every rank must call it."""
        peaks: list[Any] = [peak_memory(device)]
        if self.place.of > 1:
            peaks = [None] * self.place.of
            dist.all_gather_object(peaks, peak_memory(device))
        if self.place.index > 0:
            return
        seconds = self._moments[-1] - self._moments[0]
        taken = sum(self.global_samples(step) for step in range(len(self.losses)))
        report = {
            "metrics": {name: value for name, value in metrics.items() if not is_curve(value)},
            "final_loss": self.losses[-1],
            "steps": len(self.losses),
            "seconds": seconds,
            "samples_per_second": taken / seconds,
            "peak_memory_bytes": peaks,
            "engine": engine,
            "processes": self.place.of,
            "threads": torch.get_num_threads(),
            "device": device.type,
            "versions": versions(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        steps = zip(self.losses, pairwise(self._moments), strict=True)
        lines = (
            json.dumps({"step": step, "loss": loss, "step_seconds": until - since}) + "\n"
            for step, (loss, (since, until)) in enumerate(steps)
        )
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def _moved(value: Any, device: torch.device) -> Any:
    from samestep.data.loader import to_device

    return to_device(tuple(value), device, torch.float32)
