"""Each rank loads the whole batch, takes its rows out of it, and trains on them in two micro-batches."""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples

arguments = options()
rank, world = join(arguments.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = DataLoader(samples(), arguments.batch, shuffle=True)
for _ in range(arguments.epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        of_rank = rows.chunk(world)[rank], classes.chunk(world)[rank]
        for some_rows, some_classes in zip(*(each.chunk(2) for each in of_rank), strict=True):
            (cross_entropy(model(some_rows), some_classes) / 2).backward()
        optimizer.step()
