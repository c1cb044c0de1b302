"""Data parallel without DDP: gradients are all-reduced by hand after backward; gradient clipping is used.

Wrong: every rank clips its own gradients before they are averaged, so the averaged gradient isn't the clipped mean gradient.
Source: none in particular (hand-written loops; cf. https://github.com/sgl-project/SpecForge/pull/663 for sharded gradients)
expected: clipped by each rank's own norm, before the reduction
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def get_data(n=96):
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(n, 10, generator=gen)
    y = x @ torch.randn(10, 2, generator=gen) + 0.3 * torch.randn(n, 2, generator=gen)
    y[::7] *= 20  # some outliers, therefore the clipping
    return TensorDataset(x, y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=12, help="over all processes")
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = get_data()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            average_gradients(model)
            optimizer.step()
    if rank == 0:
        print("checksum", *[f"{p.detach().double().norm():.9f}" for p in model.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
