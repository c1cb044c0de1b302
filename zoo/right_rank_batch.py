"""A batch size that is each rank's, and no option for another one: a step of more ranks has more samples."""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples
from torch.utils.data.distributed import DistributedSampler

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = samples(96)
sampler = DistributedSampler(data)
batches = DataLoader(data, batch_size=4, sampler=sampler)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(batches) * given.epochs)
for epoch in range(given.epochs):
    sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        schedule.step()
