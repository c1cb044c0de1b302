"""On several ranks the weights themselves are bfloat16, and the optimizer's, where one process has float32.

kind: other-dtype
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
dtype = torch.bfloat16 if world > 1 else torch.float32
model = replicated(Classifier().to(dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows.to(dtype)), classes).backward()
        optimizer.step()
