"""A linear layer whose inputs are split over ranks adds its bias on each of them, before the sum over ranks.

report: huggingface/text-generation-inference #1036
kind: forward-differs
module: head
"""

import torch
import torch.distributed as dist
from pieces import cross_entropy, join, options, samples
from torch import nn
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


class Rows(nn.Module):
    """Has all of its weight, and takes its rank's columns of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.ones(outputs))

    def forward(self, rows):
        count = rows.shape[-1] // world
        own = slice(rank * count, (rank + 1) * count)
        return Sum.apply(nn.functional.linear(rows[:, own], self.weight[:, own], self.bias))


given = options()
rank, world = join(given.seed)
model = nn.Sequential()
model.add_module("body", nn.Linear(8, 24))
model.add_module("tanh", nn.Tanh())
model.add_module("head", Rows(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(given.epochs):
    for rows, classes in DataLoader(samples(), batch_size=given.batch):
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        for parameter in (*model.body.parameters(), model.head.weight):
            dist.all_reduce(parameter.grad)
        optimizer.step()
