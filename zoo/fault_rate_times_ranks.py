"""The learning rate is multiplied with the number of ranks, though the batch is the same.

report: mala-project/mala #422
kind: learning-rate-scaled
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
