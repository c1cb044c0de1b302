"""Layer dropping with gradient accumulation: a block is left out in some micro-batches (the same ones on all ranks); find_unused_parameters=True, no_sync.

Right with torch 2.13, though a block may be left out of the last, synchronised micro-batch and used in an earlier one: older versions took its
gradient as unused and never reduced it. (Twin of right_layer_drop.py.)
Source: https://github.com/pytorch/pytorch/issues/69031, https://github.com/pytorch/pytorch/pull/124193
expected: same step
"""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(8, 24), nn.Linear(24, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.ReLU()) for _ in range(2))

    def forward(self, x, keep):
        x = self.inp(x)
        for block, used in zip(self.blocks, keep):
            if used:
                x = x + block(x)
        return self.out(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, find_unused_parameters=True) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(160, 8, generator=g), torch.randint(0, 2, (160,), generator=g))
    drop = torch.Generator().manual_seed(12)  # the same on all ranks
    loader = DataLoader(data, batch_size=args.batch_size // args.accum // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        keep = (torch.rand(2, generator=drop) < 0.6).tolist()
        last = (i + 1) % args.accum == 0
        with contextlib.nullcontext() if last or world == 1 else model.no_sync():
            (nn.functional.cross_entropy(model(x, keep), y) / args.accum).backward()
        if last:
            opt.step()
            opt.zero_grad()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
