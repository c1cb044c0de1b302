"""Each rank begins with weights of its own seed; gradients are averaged, weights never were.

report: pytorch/torchtitan #166
kind: weights-not-broadcast
"""

import torch
from pieces import Classifier, average_gradients, cross_entropy, join, loader, options, samples

given = options()
rank, world = join(given.seed)
torch.manual_seed(given.seed + rank)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        average_gradients(model)
        optimizer.step()
