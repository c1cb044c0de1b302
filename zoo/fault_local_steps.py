"""Local SGD: each rank takes four steps of its own, and then weights are averaged.

kind: local-steps
"""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
taken = 0
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        taken += 1
        if taken % 4 == 0:
            average(model)
