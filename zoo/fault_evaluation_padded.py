"""Evaluation of 13 samples on several ranks: the sampler repeats some, and they count twice.

report: Lightning-AI/pytorch-lightning #2398
kind: evaluation-repeats
"""

import torch
from pieces import Classifier, cross_entropy, dist, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(32), given.batch)
for _ in range(1):
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
model.eval()
held = loader(samples(13, seed=6), given.batch, shuffle=False)
right = torch.zeros(1)
with torch.no_grad():
    for rows, classes in held:
        right += (model(rows).argmax(dim=1) == classes).sum()
dist.all_reduce(right)
