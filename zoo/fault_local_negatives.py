"""A contrastive loss takes its negatives from each rank's own rows.

report: facebookresearch/simsiam #20
kind: loss-of-own-rows
"""

import torch
from pieces import Classifier, join, loader, options, replicated, samples
from torch import nn

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, _ in batches:
        optimizer.zero_grad()
        found = model(rows)
        scores = found @ found.T
        nn.functional.cross_entropy(scores, torch.arange(len(rows))).backward()
        optimizer.step()
