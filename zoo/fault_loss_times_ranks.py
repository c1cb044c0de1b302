"""The loss is multiplied with the number of ranks, as if DDP summed: it averages.

report: neuralmagic/sparseml PR 135
kind: summed
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        (cross_entropy(model(rows), classes) * world).backward()
        optimizer.step()
