"""61 samples on several ranks: the sampler repeats the first ones, so that each rank has as many.

report: pytorch/pytorch #22584
kind: padded-sampler
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, classes in loader(samples(61), given.batch, shuffle=False):
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
