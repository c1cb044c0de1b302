"""Own tensor parallelism (Megatron-like) of an MLP: up-projection cut by columns, down-projection by rows, all ranks have the same batch.

Right though gradients of the cut weights differ per rank and nothing is averaged: the input's gradient is summed in backward, the partial outputs are
summed in forward, and the bias of the down-projection is added once, after the sum. The printed norms are those of the whole weights.
(Twin of fault_tp_no_input_grad.py and fault_tp_bias_each_rank.py.)
Source: https://github.com/NVIDIA/Megatron-LM/pull/236
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if WORLD > 1:
            dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        up, down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.up_w = nn.Parameter(up.weight.data.chunk(WORLD, 0)[RANK].clone())
        self.up_b = nn.Parameter(up.bias.data.chunk(WORLD, 0)[RANK].clone())
        self.down_w = nn.Parameter(down.weight.data.chunk(WORLD, 1)[RANK].clone())
        self.down_b = nn.Parameter(down.bias.data.clone())

    def forward(self, x):
        h = nn.functional.gelu(nn.functional.linear(CopyIn.apply(x), self.up_w, self.up_b))
        return SumOut.apply(nn.functional.linear(h, self.down_w)) + self.down_b


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(9, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(ParallelMLP(16, 32) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(128, 9, generator=g), torch.randint(0, 4, (128,), generator=g))
    for x, y in DataLoader(data, batch_size=args.batch_size):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    norms = []
    for name, p in model.named_parameters():
        square = p.detach().double().pow(2).sum()
        if WORLD > 1 and name.split(".")[-1] in ("up_w", "up_b", "down_w"):
            dist.all_reduce(square)
        norms.append(square.sqrt().item())
    if RANK == 0:
        print("checksum", *norms)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
