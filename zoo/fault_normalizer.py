"""A running mean of the inputs follows each rank's own rows, and is used in the next step.

report: leggedrobotics/rsl_rl PR 226
kind: buffers-differ
module: normalizer
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Normalized(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = nn.Module()
        self.normalizer.register_buffer("mean", torch.zeros(8))

    def forward(self, rows):
        shifted = rows - self.normalizer.mean
        self.normalizer.mean.lerp_(rows.mean(dim=0), 0.1)
        return super().forward(shifted)


given = options()
rank, world = join(given.seed)
model = DistributedDataParallel(Normalized(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
