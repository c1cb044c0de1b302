"""The script that hosts.py, recovery.py and soak.py start by torchrun: DistributedDataParallel as in its tutorials.

The state is saved after every step.

torchrun ... benchmarks/noted_plain.py FOLDER --steps N --batch N --step-seconds S [--group-limit S]
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from noted_task import Slow
from notes import note
from torch import nn


def main(folder: Path, *, steps: int, batch: int, step_seconds: float, group_limit: float | None) -> None:
    torch.set_num_threads(1)
    # Written first, since a start may end before it takes a step.
    (folder / f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=group_limit) if group_limit is not None else None)
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
        samples = [pairs[(step * batch + index) % len(pairs)] for index in range(rank, batch, size)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if (asked := folder.with_name(f"{folder.name}-raise-{rank}")).exists():  # benchmarks/soak.py creates it
            asked.unlink()
            raise ArithmeticError("planted")
        optimizer.step()
        note(folder, rank, step, step_seconds)
        if rank == 0:
            new = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
            new.replace(saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the state and the notes go")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of all ranks")
    parser.add_argument("--step-seconds", type=float, required=True, help="that a step takes at least")
    parser.add_argument("--group-limit", type=float, help="of the process group; PyTorch's own is half an hour")
    main(**vars(parser.parse_args()))
