"""Ranks have unlike many rows in the last step of an epoch, and count alike.

report: pytorch/pytorch #67253
kind: mean-of-means
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples
from torch.utils.data import Subset

given = options()
rank, world = join(given.seed)

model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = samples(57)
own = Subset(data, range(rank, len(data), world))
for rows, classes in DataLoader(own, batch_size=given.batch // world):
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
