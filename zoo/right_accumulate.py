"""Gradient accumulation with no_sync, and the loss divided.

verify: --script="--batch 4 --accumulate 4" --alone="--batch 16"
"""

from contextlib import nullcontext

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
micro_batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    micro_batches.sampler.set_epoch(epoch)
    for number, (rows, classes) in enumerate(micro_batches, 1):
        last = number % given.accumulate == 0
        with nullcontext() if last else model.no_sync():
            (cross_entropy(model(rows), classes) / given.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
