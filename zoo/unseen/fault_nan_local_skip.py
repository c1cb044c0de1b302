"""Hand-written data parallelism with a guard: where a batch gives a loss that isn't finite, its gradients are set to zero.

Wrong: the guard is each rank's own; the good ranks' gradients are still averaged over all ranks, so the step is taken with a part, shrunk.
Source: https://github.com/ecmwf/WeatherGenerator/issues/2724 (decision by one rank)
expected: one rank skips a batch that the others train on
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def corrupted(n=128):
    g = torch.Generator().manual_seed(61)
    x = torch.randn(n, 9, generator=g)
    y = torch.tanh(x @ torch.randn(9, 3, generator=g))
    x[37] = float("inf")  # a broken record
    x[90, 2] = float("nan")
    return TensorDataset(x, y)


def backward_guarded(loss, params):
    if torch.isfinite(loss):
        loss.backward()
        return True
    for p in params:
        p.grad = torch.zeros_like(p)
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 32), nn.Softplus(), nn.Linear(32, 3))
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.1)
    data = corrupted()
    skipped = 0
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        opt.zero_grad()
        skipped += not backward_guarded(nn.functional.mse_loss(model(x), y), params)
        if world > 1:
            for p in params:
                dist.all_reduce(p.grad)
                p.grad /= world
        opt.step()
    if rank == 0:
        print("skipped", skipped)
        print("checksum", *[p.detach().double().norm().item() for p in params])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
