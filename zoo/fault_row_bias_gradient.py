"""A row-wise layer divides its bias by the ranks before their sum: the bias' gradient is divided as well.

report: pytorch/torchtitan PR 4332
kind: some-gradients-scaled
module: head.bias
"""

import torch
import torch.distributed as dist
from pieces import cross_entropy, join, options, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader


class Sum(torch.autograd.Function):
    """Forward: the sum over ranks. Backward: the same gradient for each."""

    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Head(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(1)]))
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, rows):
        count = rows.shape[-1] // world
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        own = rows[:, rank * count : (rank + 1) * count]
        return Sum.apply(nn.functional.linear(own, weight, self.bias / world))


given = options()
rank, world = join(given.seed)
mesh = init_device_mesh("cpu", (world,))
model = nn.Sequential()
model.add_module("body", nn.Linear(8, 24))
model.add_module("tanh", nn.Tanh())
model.add_module("head", Head(nn.Linear(24, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(given.epochs):
    for rows, classes in DataLoader(samples(), batch_size=given.batch):
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        for parameter in model.body.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
