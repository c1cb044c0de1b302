"""61 samples on several ranks: the sampler drops the last ones, so that each rank has as many.

report: pytorch/pytorch #25162
kind: lost-samples
"""

import torch
from pieces import Classifier, DataLoader, DistributedSampler, cross_entropy, join, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = samples(61)
sampler = DistributedSampler(data, shuffle=False, drop_last=True)
for rows, classes in DataLoader(data, batch_size=given.batch // world, sampler=sampler):
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
