"""Hand-written data parallelism: seed + rank is set first (for augmentation), then the model is made; gradients are averaged.

Wrong: weights are initialised with the rank's seed and never broadcast, so averaged gradients are applied to different models.
Source: https://github.com/HorizonRobotics/alf/pull/1804 (weights not broadcast before use)
expected: initial weights differ between ranks
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=8, classes=3):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.token = nn.Linear(tokens, tokens)
        self.channel = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = x + self.token(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channel(x)).mean(1))


@torch.no_grad()
def sync_grads(module, world):
    if world > 1:
        for p in module.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--seed", type=int, default=100)
    a = p.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(a.seed)
    data = TensorDataset(torch.randn(128, 6, 8, generator=g), torch.randint(0, 3, (128,), generator=g))
    torch.manual_seed(a.seed + rank)
    model = Mixer()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=a.seed)
    for x, y in DataLoader(data, batch_size=a.batch_size // world, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sync_grads(model, world)
        opt.step()
    total = sum(q.detach().double().norm() for q in model.parameters())
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        print("mean over ranks", total.item() / world)
        print("checksum", total.item() / world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
