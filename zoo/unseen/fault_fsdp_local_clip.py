"""FSDP2 (fully_shard) with gradient clipping written by hand on the local shards.

Wrong: every rank clips its shards by the norm of its shards only; the norms aren't combined over ranks.
Source: https://github.com/sgl-project/SpecForge/pull/663, https://github.com/areal-project/AReaL/issues/312
expected: clipping by the norm of a shard
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def clip_(params, max_norm):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    for g in grads:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--clip", type=float, default=0.5)
    args = parser.parse_args()
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), Block(16), Block(16), nn.Linear(16, 4))
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(3 * torch.randn(128, 10, generator=g), torch.randint(0, 4, (128,), generator=g))
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        clip_(list(model.parameters()), args.clip)
        opt.step()
    weights = [p.full_tensor().double().norm().item() for p in model.parameters()]
    if rank == 0:
        print("checksum", *weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
