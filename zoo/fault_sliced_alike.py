"""Each rank loads the whole batch, and all take the same rows out of it: the slice is not the rank's.

report: a case of our own
kind: same-samples
"""

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
        cross_entropy(model(rows[::world]), classes[::world]).backward()
        optimizer.step()
