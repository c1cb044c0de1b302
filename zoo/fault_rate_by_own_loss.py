"""Each rank lowers its learning rate by its own loss: the replicas go apart.

report: lucidrains/DALLE-pytorch #268
kind: learning-rate-differs
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()

        schedule.step(loss)
