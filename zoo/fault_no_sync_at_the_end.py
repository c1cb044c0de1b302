"""The first micro-batch is reduced, and the last one isn't: each rank steps by gradients of its own.

report: modelscope/FunASR PR 3472
kind: not-reduced
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
        first = number % given.accumulate == 1
        with nullcontext() if first else model.no_sync():
            (cross_entropy(model(rows), classes) / given.accumulate).backward()
        if number % given.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
