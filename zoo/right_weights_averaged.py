"""Weights are averaged after each step of SGD with momentum, in place of gradients: the same but for rounding."""

import torch
import torch.distributed as dist
from pieces import Classifier, cross_entropy, join, loader, options, samples


def average(model: torch.nn.Module) -> None:
    """The mean of all ranks' weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


given = options()
rank, world = join(given.seed)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        average(model)
