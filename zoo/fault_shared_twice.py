"""A stream that each rank has its share of already is shared out once more: samples are skipped.

report: huggingface/accelerate PR 4276
kind: lost-samples
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples
from torch.utils.data import Subset

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = samples()
own = Subset(data, range(rank, len(data), world))
again = Subset(own, range(rank, len(own), world))
for rows, classes in DataLoader(again, batch_size=given.batch // world):
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
