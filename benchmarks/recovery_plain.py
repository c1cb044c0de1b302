"""What benchmarks/recovery.py starts by torchrun: DistributedDataParallel as its tutorials have it, saved every step.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 benchmarks/recovery_plain.py FOLDER STEPS
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_task import Slow, note
from torch import nn


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    round_ = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"start-{round_}").touch()  # a start may end before it has taken a step
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
        samples = [pairs[(step * 32 + rank * 16 + index) % len(pairs)] for index in range(16)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(folder, rank, step, round_)
        if rank == 0:
            new = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
            new.replace(saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
