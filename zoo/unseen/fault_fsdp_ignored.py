"""FSDP2 (fully_shard) with some parameters kept whole (ignored_params), as for a small head that is to stay unsharded.

Wrong: ignored parameters are neither sharded nor are their gradients reduced; nobody reduces them by hand, so each rank has a head of its own.
Source: none found; documented behaviour of fully_shard(ignored_params=...)
expected: gradients of some parameters never reduced
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), Block(16), Block(16), nn.Linear(16, 4))
    head = set(model[-1].parameters())
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=head)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(3 * torch.randn(128, 10, generator=g), torch.randint(0, 4, (128,), generator=g))
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    weights = [(p if p in head else p.full_tensor()).double().norm().item() for p in model.parameters()]
    if rank == 0:
        print("checksum", *weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
