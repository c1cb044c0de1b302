"""Imbalanced classification; the cross entropy is weighted by inverse class frequencies counted in the current batch.

Wrong: classes are counted in the rank's own part of the batch (and the weighted mean is normalised by its own weights).
Source: none; as https://github.com/NVIDIA-BioNeMo/KERMT/pull/21 (review: normalisation by local counts)
expected: class weights and normalisation by local counts
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 4


def make_data(n=120):
    g = torch.Generator().manual_seed(15)
    y = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), n, replacement=True, generator=g)
    return TensorDataset(torch.randn(CLASSES, 11, generator=g)[y] + torch.randn(n, 11, generator=g), y)


def balanced_loss(logits, y):
    counts = torch.bincount(y, minlength=CLASSES).float()
    weight = 1.0 / counts.clamp(min=1)
    return nn.functional.cross_entropy(logits, y, weight=weight)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = make_data()
    sampler = DistributedSampler(data, world, rank, seed=2)
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=sampler):
        loss = balanced_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
