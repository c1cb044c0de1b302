"""What benchmarks/hosts.py starts by torchrun: DistributedDataParallel as its tutorials have it, saved every step.

    torchrun ... benchmarks/hosts_plain.py FOLDER STEPS [SECONDS]

SECONDS is the time limit of the process group; PyTorch's own is half an hour.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from hosts_task import Slow, note
from torch import nn


def main(folder: Path, steps: int, limit: float | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit) if limit is not None else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    task = Slow()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters())
    saved = folder / "checkpoint.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    pairs = task.train_set()
    for step in range(first, steps):
        samples = [pairs[(step * 24 + index) % len(pairs)] for index in range(rank, 24, size)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(folder, step)
        if rank == 0:
            new = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
            new.replace(saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else None)
