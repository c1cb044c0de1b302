"""Each rank clips its own gradient, and then they are averaged.

report: mindspore-lab/mindcv #603
kind: clip-before-reduction
"""

import torch
from pieces import Classifier, average_gradients, cross_entropy, join, loader, options, samples

given = options()
rank, world = join(given.seed)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        average_gradients(model)
        optimizer.step()
