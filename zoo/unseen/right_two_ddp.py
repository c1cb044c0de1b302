"""Face-recognition-like training with an ArcFace loss whose class centres are parameters of the loss module; backbone and loss under a DDP each.

Right: two DDP modules in one process group, called in the same order on all ranks; the second one's forward returns the loss itself.
(Twin of fault_loss_weights_unwrapped.py.)
Source: https://github.com/KevinMusgrave/pytorch-metric-learning/issues/710
expected: same step
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ArcFace(nn.Module):
    def __init__(self, dim, classes, scale=16.0, margin=0.2):
        super().__init__()
        self.W = nn.Parameter(torch.randn(classes, dim) * 0.1)
        self.scale, self.cos_m, self.sin_m = scale, math.cos(margin), math.sin(margin)

    def forward(self, emb, y):
        cos = F.normalize(emb) @ F.normalize(self.W).T
        sin = (1 - cos.pow(2)).clamp(min=1e-6).sqrt()
        with_margin = cos * self.cos_m - sin * self.sin_m
        hot = F.one_hot(y, cos.shape[1]).bool()
        return F.cross_entropy(self.scale * torch.where(hot, with_margin, cos), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--people", type=int, default=8)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(12)
    backbone = nn.Sequential(nn.Linear(20, 40), nn.PReLU(), nn.Linear(40, 10))
    criterion = ArcFace(10, args.people)
    model = DDP(backbone) if world > 1 else backbone
    loss_fn = DDP(criterion) if world > 1 else criterion
    opt = torch.optim.SGD([{"params": model.parameters()}, {"params": criterion.parameters(), "weight_decay": 0}],
                          lr=0.05, momentum=0.9, weight_decay=5e-4)
    g = torch.Generator().manual_seed(4)
    who = torch.randint(0, args.people, (160,), generator=g)
    faces = torch.randn(args.people, 20, generator=g)[who] + 0.5 * torch.randn(160, 20, generator=g)
    data = TensorDataset(faces, who)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True))
    for x, y in loader:
        opt.zero_grad()
        loss_fn(model(x), y).backward()
        opt.step()
    if rank == 0:
        weights = list(backbone.parameters()) + list(criterion.parameters())
        print("checksum", *[p.detach().double().norm().item() for p in weights])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
