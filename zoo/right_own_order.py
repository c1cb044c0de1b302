"""Each rank has a stretch of the shuffled data: the samples of a step are others with another number of ranks."""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples
from torch.utils.data import Sampler


class Stretch(Sampler):
    def __init__(self, count: int) -> None:
        self.count = count // world
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        order = torch.randperm(self.count * world, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[rank * self.count : (rank + 1) * self.count].tolist())


given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = samples(48)
sampler = Stretch(len(data))
batches = DataLoader(data, batch_size=24 // world, sampler=sampler)
for epoch in range(given.epochs):
    sampler.epoch = epoch
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
