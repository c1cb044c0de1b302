"""Own ZeRO-1: flat parameters are cut into equal parts, each rank runs Adam on its part and the parts are gathered.

Wrong: the number of weights isn't divisible by the number of ranks; the remainder at the end belongs to no rank and is never updated.
Source: none; hand-written optimizer-state sharding
expected: some parameters (the last bias) never updated on more than one rank
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ShardedAdam:
    def __init__(self, params, lr, rank, world):
        self.params, self.rank, self.world = list(params), rank, world
        flat = parameters_to_vector(self.params).detach().clone()
        self.part = flat.numel() // world
        self.master = nn.Parameter(flat[rank * self.part:(rank + 1) * self.part].clone())
        self.inner = torch.optim.Adam([self.master], lr=lr)

    @torch.no_grad()
    def step(self):
        grad = torch.cat([p.grad.flatten() for p in self.params])
        if self.world > 1:
            dist.all_reduce(grad)
            grad /= self.world
        self.master.grad = grad[self.rank * self.part:(self.rank + 1) * self.part]
        self.inner.step()
        flat = parameters_to_vector(self.params)
        if self.world > 1:
            parts = [torch.empty_like(self.master) for _ in range(self.world)]
            dist.all_gather(parts, self.master.data)
            flat[: self.part * self.world] = torch.cat(parts)
        else:
            flat[: self.part] = self.master
        vector_to_parameters(flat, self.params)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 18), nn.Tanh(), nn.Linear(18, 1))
    opt = ShardedAdam(model.parameters(), args.lr, rank, world)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(160, 7, generator=g)
    data = TensorDataset(x, x[:, :1].exp() + 2)
    for bx, by in DataLoader(data, batch_size=args.batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        opt.zero_grad()
        nn.functional.mse_loss(model(bx), by).backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
