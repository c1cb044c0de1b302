"""DTensor's tensor parallel: all ranks train on the same samples, each with its slices of the weights."""

import torch
from pieces import cross_entropy, join, options, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

given = options()
rank, world = join(given.seed)
model = nn.Sequential()
model.add_module("first", nn.Linear(8, 24))
model.add_module("tanh", nn.Tanh())
model.add_module("head", nn.Linear(24, 3))
plan = {"first": ColwiseParallel(), "head": RowwiseParallel()}
parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(given.epochs):
    for rows, classes in DataLoader(samples(), batch_size=given.batch):
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
