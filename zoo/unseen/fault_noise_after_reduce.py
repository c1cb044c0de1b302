"""Gradient noise (as in Langevin dynamics or differentially private SGD), added to the gradients before the optimizer's step.

Wrong: the noise is added after DDP's reduction from the rank's own generator (seed + rank), so ranks step differently and drift apart.
Source: none found; noise with rank-dependent seeds after the reduction
expected: weights differ between ranks (noise of each rank's own on the reduced gradient)
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Noise:
    def __init__(self, sigma, seed):
        self.sigma, self.generator = sigma, torch.Generator().manual_seed(seed)

    def add_(self, params):
        for p in params:
            p.grad.add_(torch.randn(p.shape, generator=self.generator), alpha=self.sigma)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--sigma", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=20)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = Noise(args.sigma, args.seed + rank)
    g = torch.Generator().manual_seed(args.seed)
    x = torch.randn(128, 8, generator=g)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    for bx, by in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        opt.zero_grad()
        nn.functional.cross_entropy(model(bx), by).backward()
        noise.add_(model.parameters())
        opt.step()
    sums = torch.stack([p.detach().double().norm() for p in net.parameters()])
    spread = sums.clone()
    if world > 1:
        dist.all_reduce(spread)
    if rank == 0:
        print("distance of rank 0 from the mean of ranks", (spread / world - sums).abs().max().item())
        print("checksum", *sums.tolist())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
