"""Every rank evaluates all samples, and the counts of all ranks are added up.

report: pytorch/examples #461
kind: evaluation-repeats
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, dist, join, loader, options, replicated, samples

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
held = DataLoader(samples(13, seed=6), batch_size=4)
right = torch.zeros(1)
with torch.no_grad():
    for rows, classes in held:
        right += (model(rows).argmax(dim=1) == classes).sum()
dist.all_reduce(right)
