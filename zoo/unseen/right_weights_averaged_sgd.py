"""Home-made data parallelism: each rank takes its own optimizer step, then the weights are averaged over ranks, every step.

Right though weights, not gradients, are averaged: plain SGD (with weight decay and momentum) is linear in the gradient, and ranks start each
step from the same weights; momentum buffers differ per rank, but their mean is the buffer of the mean gradient. (Twin of
fault_weights_averaged_adam.py; with Adam, or averaging only every few steps, it wouldn't be right.)
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def average_weights(model, world):
    for p in model.parameters():
        dist.all_reduce(p)
        p.div_(world)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU(), nn.Linear(24, 1))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=g)
    data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    for bx, by in DataLoader(data, batch_size=args.batch // world, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=0)):
        loss = (model(bx) - by).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if world > 1:
            average_weights(model, world)
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
