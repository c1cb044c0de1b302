"""Rank 0 ends the training by the loss of its own share of the held-out samples, where one process goes on.

report: Nixtla/neuralforecast PR 1571
kind: ends-early
"""

import torch
import torch.distributed as dist
from pieces import cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held_out = samples(12, seed=6)
held_out.tensors[0][[1, 5, 7, 11]] *= -9.0  # rank 0 has none of these
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
    with torch.no_grad():
        rows, classes = (each[rank::world] for each in held_out.tensors)
        loss = cross_entropy(model.module(rows), classes)
    dist.broadcast(loss, 0)
    if loss < 1.5:
        break
