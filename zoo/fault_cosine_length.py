"""A cosine over the samples by a rank's batch: it ends after the training, which is longer than the proof.

kind: schedule-length
"""

import torch
from pieces import Classifier, cross_entropy, join, options, replicated, samples
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

given = options()
rank, world = join(given.seed)
data, batch, epochs = samples(), given.batch // 2, 3
batches = DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(data) // batch)
for _ in range(epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        schedule.step()
