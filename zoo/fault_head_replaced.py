"""The head is replaced after DDP has broadcast and taken the parameters: it is each rank's own.

report: pytorch/pytorch #12603
kind: weights-not-broadcast
module: head
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel

given = options()
rank, world = join(given.seed)
model = DistributedDataParallel(Classifier(), find_unused_parameters=True)
torch.manual_seed(given.seed + 100 * rank)
model.module.head = nn.Linear(16, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
