"""Each rank splits the data at random for itself: it trains on what another one tests.

report: pytorch/examples, minGPT-ddp
kind: data-differs
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.utils.data import random_split

given = options()
rank, world = join(given.seed)
everything = samples(80)
torch.manual_seed(given.seed + 100 * rank)
data, _ = random_split(everything, [0.8, 0.2])
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(data, given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
