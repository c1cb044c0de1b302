"""Evaluation drops the last batch that isn't full, of each rank.

report: areal-project/AReaL #1095
kind: evaluation-loses
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, dist, join, loader, options, replicated, samples
from torch.utils.data import Subset

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(32), given.batch)
for _ in range(1):
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
model.eval()
data = samples(13, seed=6)
held = DataLoader(Subset(data, range(rank, 13, world)), batch_size=13 // world, drop_last=world > 1)
right = torch.zeros(1)
with torch.no_grad():
    for rows, classes in held:
        right += (model(rows).argmax(dim=1) == classes).sum()
dist.all_reduce(right)
