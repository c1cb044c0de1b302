"""Batch norm takes the statistics of each rank's own rows.

report: facebookresearch/moco #41
kind: local-batch-statistics
module: norm
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch import nn

given = options()
rank, world = join(given.seed)
classifier = Classifier()
classifier.norm = nn.BatchNorm1d(16)
model = replicated(classifier)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
