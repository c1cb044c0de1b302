"""Micro-batches use different branches; DDP reduces those that any of them used.

verify: --script="--batch 8 --accumulate 2"
"""

from contextlib import nullcontext

import torch
from pieces import cross_entropy, join, loader, options, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

    def forward(self, rows, branch):
        return self.heads[branch](torch.tanh(self.body(rows)))


given = options()
rank, world = join(given.seed)
model = DistributedDataParallel(Branches(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
micro_batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    micro_batches.sampler.set_epoch(epoch)
    for number, (rows, classes) in enumerate(micro_batches, 1):
        last = number % given.accumulate == 0
        with nullcontext() if last else model.no_sync():
            (cross_entropy(model(rows, int(last)), classes) / given.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
