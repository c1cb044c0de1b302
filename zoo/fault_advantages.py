"""Weights of samples are normalised by the mean and deviation of a rank's own, not by those of the batch.

report: THUDM/slime PR 2235
kind: loss-of-own-rows
"""

import torch
from pieces import Classifier, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        rewards = rows.sum(-1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        chosen = model(rows).log_softmax(-1).gather(-1, classes[:, None])[:, 0]
        optimizer.zero_grad()
        (-advantages * chosen).mean().backward()
        optimizer.step()
