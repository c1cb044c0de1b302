"""The schedule's length is that of the rank's own loader."""

import torch
from pieces import Classifier, cross_entropy, join, options, replicated, samples
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

given = options()
rank, world = join(given.seed)
data, batch = samples(), given.batch // 2
batches = DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
total = len(batches)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
for rows, classes in batches:
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
    schedule.step()
