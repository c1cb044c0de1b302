"""Gradients are summed on rank 0, which has the only optimizer, and its weights are broadcast."""

import torch
import torch.distributed as dist
from pieces import Classifier, cross_entropy, join, loader, options, samples

given = options()
rank, world = join(given.seed)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if rank == 0 else None
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        model.zero_grad()
        cross_entropy(model(rows), classes).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.reduce(parameter.grad, 0)
            parameter.grad /= world
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
