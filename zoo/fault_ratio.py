"""A ratio of sums over the rows is taken on each rank's own, and DDP averages those ratios.

report: MIC-DKFZ/nnUNet #1354
kind: loss-of-own-rows
"""

import torch
from pieces import Classifier, join, loader, options, replicated, samples


def dice(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    found, wanted = scores.softmax(-1), torch.nn.functional.one_hot(classes, 3)
    return 1 - (2 * (found * wanted).sum(0) / (found.sum(0) + wanted.sum(0))).mean()


given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        dice(model(rows), classes).backward()
        optimizer.step()
