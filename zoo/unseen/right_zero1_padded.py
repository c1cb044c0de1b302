"""Own ZeRO-1: flat parameters are padded to a multiple of the number of ranks, each rank runs AdamW on its part, gradients are all-reduced.

Right: 163 weights on two ranks are padded to 164; the padding has gradient 0 and is cut off again. The mean comes from dividing before the
reduction. (Twin of fault_zero_remainder.py.)
expected: same step
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
        flat = self.pad(parameters_to_vector(self.params).detach())
        self.part = flat.numel() // world
        self.master = nn.Parameter(flat[rank * self.part:(rank + 1) * self.part].clone())
        self.inner = torch.optim.AdamW([self.master], lr=lr, weight_decay=0.01)

    def pad(self, flat):
        return nn.functional.pad(flat, (0, -flat.numel() % self.world))

    @torch.no_grad()
    def step(self):
        grad = self.pad(torch.cat([p.grad.flatten() for p in self.params])) / self.world
        if self.world > 1:
            dist.all_reduce(grad)
        self.master.grad = grad.chunk(self.world)[self.rank].clone()
        self.inner.step()
        flat = self.master.data
        if self.world > 1:
            flat = torch.empty(self.part * self.world)
            dist.all_gather_into_tensor(flat, self.master.data)
        vector_to_parameters(flat[: sum(p.numel() for p in self.params)], self.params)

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
