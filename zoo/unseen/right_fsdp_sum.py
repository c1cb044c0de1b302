"""FSDP2 (fully_shard) with two micro-batches per step; reduction of gradients is a sum (divide factor 1), losses are divided by all rows.

Right though nothing averages: each row's loss is divided by the rows of all ranks and micro-batches. The first micro-batch isn't
communicated (set_requires_gradient_sync). (Twin of fault_fsdp_divide_factor.py.)
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
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
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(3 * torch.randn(128, 10, generator=g), torch.randint(0, 4, (128,), generator=g))
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=sampler):
        opt.zero_grad()
        micro = list(zip(x.chunk(2), y.chunk(2)))
        for k, (mx, my) in enumerate(micro):
            model.set_requires_gradient_sync(k + 1 == len(micro))
            loss = nn.functional.cross_entropy(model(mx), my, reduction="sum") / args.batch_size
            loss.backward()
        opt.step()
    weights = [p.full_tensor().double().norm().item() for p in model.parameters()]
    if rank == 0:
        print("checksum", *weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
