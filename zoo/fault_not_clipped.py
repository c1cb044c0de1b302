"""Clipping is only called where there is one process.

report: simchowitzlabpublic/nano-world-model PR 22
kind: not-clipped
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        if world == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
