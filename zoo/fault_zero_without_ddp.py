"""ZeroRedundancyOptimizer shards the optimizer alone: without DDP nobody reduces the gradients.

report: pytorch/pytorch PR 46750
kind: not-reduced
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.optim import ZeroRedundancyOptimizer

given = options()
rank, world = join(given.seed)
model = Classifier()
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
