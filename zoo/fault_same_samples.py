"""Every rank iterates over the whole data in the same order: no sampler cuts it into shares.

report: huggingface/datasets #5360
kind: same-samples
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(samples(), batch_size=given.batch // world)
for rows, classes in batches:
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
