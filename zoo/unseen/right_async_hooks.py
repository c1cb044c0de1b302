"""Hand-written data parallelism: hooks start an asynchronous all-reduce per gradient while backward goes on; a wait before the step.

Right: gradients are divided by the world size before they are summed, and all handles are waited for. (Twin of fault_reduce_sum.py.)
expected: same step
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Waves(Dataset):
    def __init__(self, n=80):
        rng = np.random.default_rng(2)
        self.phase = rng.uniform(0, 6.28, n)
        self.freq = rng.integers(1, 5, n)

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        t = np.linspace(0, 6.28, 16)
        return torch.tensor(np.sin(self.freq[i] * t + self.phase[i]), dtype=torch.float32), int(self.freq[i]) - 1


class Chunk(Sampler):
    """Contiguous part of every global batch."""

    def __init__(self, n, batch, rank, world):
        self.n, self.batch, self.rank, self.world = n, batch, rank, world

    def __iter__(self):
        part = self.batch // self.world
        for start in range(0, self.n - self.batch + 1, self.batch):
            yield list(range(start + self.rank * part, start + (self.rank + 1) * part))

    def __len__(self):
        return self.n // self.batch


class Overlap:
    def __init__(self, model, world):
        self.world, self.pending = world, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.start)

    def start(self, p):
        if self.world > 1:
            p.grad.div_(self.world)
            self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        while self.pending:
            self.pending.pop().wait()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    overlap = Overlap(model, world)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = Waves()
    for x, y in DataLoader(data, batch_sampler=Chunk(len(data), args.batch_size, rank, world)):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        overlap.wait()
        opt.step()
    if rank == 0:
        print("loss", loss.item())
        print("checksum", *[f"{p.detach().double().norm():.9f}" for p in model.parameters()])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
