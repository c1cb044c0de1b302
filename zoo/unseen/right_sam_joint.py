"""Sharpness-aware minimisation with DDP: ascent along the gradient, second gradient there, descent; both gradients are reduced.

Right though weights are changed between two backwards of one step: all ranks climb along the mean gradient and come back. (Twin of
fault_sam_local_ascent.py.)
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def climb(params, rho):
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    moves = [p.grad * (rho / (norm + 1e-12)) for p in params]
    for p, m in zip(params, moves):
        p.add_(m)
        p.grad = None
    return moves


@torch.no_grad()
def back(params, moves):
    for p, m in zip(params, moves):
        p.sub_(m)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--rho", type=float, default=0.5)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    model = DDP(net) if world > 1 else net
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(10)
    data = TensorDataset(torch.randn(128, 10, generator=g), torch.randint(0, 3, (128,), generator=g))
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        moves = climb(params, args.rho)
        nn.functional.cross_entropy(model(x), y).backward()
        back(params, moves)
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in params])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
