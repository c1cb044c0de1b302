"""Gradients are clipped after each micro-batch, before they have been added up.

report: huggingface/transformers #1563
kind: clip-each-micro-batch
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
        (cross_entropy(model(rows), classes) / given.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if number % given.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
