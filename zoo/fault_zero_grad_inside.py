"""Gradients are set to zero before each micro-batch: the step has the last one's alone.

report: bytetriper/RAE #67
kind: lost-micro-batches
verify: --script="--batch 4 --accumulate 4" --alone="--batch 16"
"""

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
        optimizer.zero_grad()
        (cross_entropy(model(rows), classes) / given.accumulate).backward()
        if number % given.accumulate == 0:
            optimizer.step()
