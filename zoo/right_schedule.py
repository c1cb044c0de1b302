"""A schedule that is stepped once in each step, and decay that spares vectors."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
groups = [
    {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1]},
    {"params": [parameter for parameter in model.parameters() if parameter.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()

        schedule.step()
