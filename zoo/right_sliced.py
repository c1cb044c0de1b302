"""Each rank loads the whole batch, and takes its rows out of it; the rows are scaled before that."""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples

arguments = options()
rank, world = join(arguments.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = DataLoader(samples(), arguments.batch, shuffle=True)
for _ in range(arguments.epochs):
    for rows, classes in batches:
        rows, classes = (2 * rows)[rank::world], classes[rank::world]
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
