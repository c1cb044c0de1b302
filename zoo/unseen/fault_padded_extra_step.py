"""Epochs over a data set whose size isn't a multiple of the number of ranks; incomplete batches are to be dropped (drop_last in the loader).

Wrong: DistributedSampler pads by repeating the first samples, which completes a batch that one process drops: an extra step with a sample seen twice.
Source: https://github.com/roboflow/rf-detr/issues/1507 (the padding, there in evaluation)
expected: repeated samples and one step more per epoch than one process takes
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.inp = nn.Linear(9, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + torch.relu(self.mid(h))).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=2)
    a = ap.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = Regressor()
    model = DDP(net) if world > 1 else net
    gen = torch.Generator().manual_seed(8)
    x = torch.randn(63, 9, generator=gen)
    data = TensorDataset(x, x.pow(2).sum(1) / 9)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False, drop_last=False)
    loader = DataLoader(data, batch_size=a.batch // world, sampler=sampler, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = 0
    for _ in range(a.epochs):
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.smooth_l1_loss(model(bx), by).backward()
            opt.step()
            steps += 1
    if rank == 0:
        print("steps", steps)
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
