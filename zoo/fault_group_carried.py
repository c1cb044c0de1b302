"""The last micro-batch of an epoch completes no group: its gradient is added to the next epoch's first step.

report: tomhosking/torchseq #8
kind: leftover-carried
verify: --script="--batch 8 --accumulate 2" --alone="--batch 16"
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.utils.data import Subset

given = options()
rank, world = join(given.seed)
data = samples()
batches = loader(Subset(data, range(len(data) * 5 // 8)), given.batch)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for number, (rows, classes) in enumerate(batches):
        (cross_entropy(model(rows), classes) / given.accumulate).backward()
        if (number + 1) % given.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
