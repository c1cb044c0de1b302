"""A whole handwritten training: its ranks, steps, evaluations, and the files that samestep would leave.

`ranks` starts the ranks, or a launcher has.
"""

import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from samestep.handwritten.loop import Loop, StepResult
from samestep.job import Job
from samestep.launch.affinity import threads_of
from samestep.launch.device import backend_of, device_of, peak_memory
from samestep.launch.world import leave_process_group
from samestep.ranks import Ranks
from samestep.run_folder import MODEL_FILE
from samestep.tasks.registry import resolve
from samestep.training import usage as usages
from samestep.training.metrics_log import Records
from samestep.training.result import TrainResult, write_report, write_weights


def train(job: Job, folder: Path, *, ranks: Ranks, meet_at: str | None = None) -> None:
    """Join the other ranks, train, write the run into `folder`, and leave.

    `meet_at` is where the ranks find each other; None: as the launcher says by its environment.
    """
    rank, world_size = ranks.rank, ranks.world_size
    device = device_of(ranks.local_rank, job.run.device)
    threads = threads_of(ranks.local_world_size, job.run.threads)
    torch.set_num_threads(threads)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if world_size > 1:
        bound = device if device.type != "cpu" else None
        dist.init_process_group(
            backend_of(device), init_method=meet_at, rank=rank, world_size=world_size, device_id=bound
        )
    loop = Loop(
        job.recipe,
        resolve(job.recipe),
        rank=rank,
        world_size=world_size,
        device=device,
        micro_batch=job.run.micro_batch,
        workers=job.run.workers,
        compile=job.run.compile,
    )
    with Records(folder if rank == 0 else None, log=job.run.log) as records:
        result = _take_all_steps(loop, records, folder)
    peaks = loop.gather(peak_memory(device))
    if rank == 0:
        write_report(
            result,
            peaks=peaks,
            layout="single" if world_size == 1 else f"dp{world_size}",
            engine="handwritten",
            processes=world_size,
            threads=threads,
            device=device.type,
        )
        write_weights(folder / MODEL_FILE, loop.model.state_dict())
    if world_size > 1:
        leave_process_group()


def _take_all_steps(loop: Loop, records: Records, folder: Path) -> TrainResult:
    """Take every step, one of them with memory and traffic measured, and evaluate."""
    losses: list[float] = []
    seconds = evaluation_seconds = 0.0
    samples = 0
    metrics = {}
    usage = None
    for step, (parts, data_seconds) in enumerate(loop.batches()):
        began = time.perf_counter()
        size = len(loop.order.global_batch(step))
        take = partial(loop.step, parts, size)
        if step == min(2, loop.total_steps - 1):
            report, usage = usages.measured(loop, take)
        else:
            report = take()
        losses.append(report.loss.item())
        step_seconds = time.perf_counter() - began
        seconds += step_seconds + data_seconds
        samples += size
        records.step(_line(loop, step, report, size, step_seconds, data_seconds))
        if _evaluates_after(loop, step + 1):
            began = time.perf_counter()
            metrics = loop.evaluate()
            evaluation_seconds += time.perf_counter() - began
            records.evaluation(step + 1, metrics)
    return TrainResult(
        metrics=metrics,
        losses=tuple(losses),
        steps=len(losses),
        seconds=seconds,
        evaluation_seconds=evaluation_seconds,
        samples_per_second=samples / seconds,
        speeds={},
        folder=folder,
        usage=loop.gather(usage),
    )


def _evaluates_after(loop: Loop, done: int) -> bool:
    """Whether the recipe has an evaluation after `done` steps."""
    evaluation = loop.recipe.evaluation
    if done == loop.total_steps:
        return evaluation.at_end
    every = evaluation.steps_between(loop.order.steps_per_epoch)
    return every is not None and done % every == 0


def _line(
    loop: Loop, step: int, report: StepResult, samples: int, step_seconds: float, data_seconds: float
) -> dict[str, float]:
    """Build a step's line of metrics.jsonl."""
    return {
        "step": step,
        "epoch": loop.order.epoch_of(step),
        "loss": report.loss.item(),
        "grad_norm": report.grad_norm.item(),
        "lr": report.lr,
        "samples": samples,
        "step_seconds": step_seconds,
        "data_seconds": data_seconds,
    }
