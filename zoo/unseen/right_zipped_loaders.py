"""Semi-supervised training: a short labelled and a longer unlabelled set, each with a loader of its own; the labelled one starts anew when exhausted.

Right: both samplers deal out rows per rank, set_epoch is called for each by its own count of passes, and confident pseudo-labels are normalised by
the batch, not by how many were confident (which would differ per rank).
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def endless(loader):
    passes = 0
    while True:
        loader.sampler.set_epoch(passes)
        yield from loader
        passes += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--labelled", type=int, default=8)
    ap.add_argument("--unlabelled", type=int, default=16)
    ap.add_argument("--threshold", type=float, default=0.5)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(4)
    y = torch.randint(0, 3, (24,), generator=g)
    centres = 1.5 * torch.randn(3, 10, generator=g)
    labelled = TensorDataset(centres[y] + torch.randn(24, 10, generator=g), y)
    u = centres[torch.randint(0, 3, (160,), generator=g)] + torch.randn(160, 10, generator=g)
    unlabelled = TensorDataset(u, u + 0.3 * torch.randn(160, 10, generator=g))

    def loader(data, batch, seed):
        return DataLoader(data, batch_size=batch // world, sampler=DistributedSampler(data, world, rank, seed=seed))

    for (x, y), (weak, strong) in zip(endless(loader(labelled, args.labelled, 1)), loader(unlabelled, args.unlabelled, 2)):
        logits = model(torch.cat([x, weak, strong]))
        lx, lw, ls = logits.split([len(x), len(weak), len(strong)])
        confidence, pseudo = lw.detach().softmax(-1).max(-1)
        mask = (confidence > args.threshold).float()
        loss = F.cross_entropy(lx, y) + (F.cross_entropy(ls, pseudo, reduction="none") * mask).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
