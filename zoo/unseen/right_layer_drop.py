"""Layer dropping with DDP and find_unused_parameters=True: a block is left out in some steps, the same ones on all ranks; no accumulation.

Right though parameters go without a gradient in some steps: they do so on all ranks; Adam skips them, as it does alone.
(Compare right_layer_drop_accum.py.)
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
    ap.add_argument("--accum", type=int, default=1)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, find_unused_parameters=True) if world > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
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
