"""The text job as an expert would write it by hand: plain PyTorch, one process or DistributedDataParallel.

    python benchmarks/handwritten/text_classification.py JOB.yaml --steps 60 --output steps.jsonl
    torchrun --nproc-per-node=2 benchmarks/handwritten/text_classification.py JOB.yaml ...

It shares with samestep what is not compared: the job's texts, its tokenizer, its model, and the order of samples,
so that both compute the same batches.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from samestep.data.order import Place, SampleOrder
from samestep.jobfile import load
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.tasks.resolve import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="one JSON line a step")
    options = parser.parse_args()

    recipe = load(options.job).job.recipe
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(options.threads)
    if world_size > 1:
        dist.init_process_group("gloo")
    for _ in train(recipe, resolve(recipe), options.steps, options.output, rank, world_size):
        pass
    if world_size > 1:
        dist.destroy_process_group()


def train(recipe: Recipe, task: Task, steps: int, output: Path, rank: int, world_size: int) -> Iterator[None]:
    """Take a step each time that one is asked for."""
    torch.manual_seed(recipe.seed)
    model = task.model()
    module = model if world_size == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.optimizer.lr, fused=True)
    warmup = int(recipe.schedule.warmup * steps)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 1 - (step - warmup) / max(1, steps - warmup)

    schedule = LambdaLR(optimizer, rate)
    samples = task.train_set()
    order = SampleOrder(size=len(samples), batch=recipe.batch, seed=recipe.seed)
    place = Place(index=rank, of=world_size)
    indices = [order.shares(step, place, None)[0].samples.tolist() for step in range(steps)]
    loader = DataLoader(samples, batch_sampler=indices, collate_fn=task.collate)  # pyright: ignore[reportArgumentType]

    with ExitStack() as stack:
        log = stack.enter_context(output.open("w", buffering=1)) if rank == 0 else None
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(module(**batch.inputs).logits, batch.targets)
            loss.backward()
            grad_norm = clip_grad_norm_(model.parameters(), recipe.clip or float("inf"))
            optimizer.step()
            schedule.step()
            if log is not None:
                log.write(json.dumps({"step": step, "loss": loss.item(), "grad_norm": grad_norm.item()}) + "\n")
            yield


if __name__ == "__main__":
    main()
