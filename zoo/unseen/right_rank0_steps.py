"""A parameter server in miniature: gradients are reduced to rank 0, only rank 0 has an optimizer (AdamW) and a schedule, weights are broadcast.

Right though ranks other than 0 never step: they get the new weights before the next forward.
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Server:
    def __init__(self, model, lr, total, rank, world):
        self.params, self.rank, self.world = list(model.parameters()), rank, world
        if rank == 0:
            self.opt = torch.optim.AdamW(self.params, lr=lr, weight_decay=0.02)
            self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, total)
        self.publish()

    def publish(self):
        if self.world > 1:
            for p in self.params:
                dist.broadcast(p.data, src=0)

    def push(self):
        for p in self.params:
            if self.world > 1:
                dist.reduce(p.grad, dst=0)
            p.grad.div_(self.world)
        if self.rank == 0:
            nn.utils.clip_grad_norm_(self.params, 1.0)
            self.opt.step()
            self.plan.step()
        for p in self.params:
            p.grad = None
        self.publish()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(40 + rank)  # only rank 0's weights count
    model = nn.Sequential(nn.Linear(7, 28), nn.Mish(), nn.Linear(28, 1))
    g = torch.Generator().manual_seed(2)
    x = torch.randn(144, 7, generator=g)
    data = TensorDataset(x, x.cos().prod(1, keepdim=True))
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=2))
    server = Server(model, args.lr, len(loader), rank, world)
    for bx, by in loader:
        (model(bx) - by).pow(2).mean().backward()
        server.push()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
