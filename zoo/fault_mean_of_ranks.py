"""Each rank takes the mean over its own labelled tokens, and DDP the mean of those.

report: meta-pytorch/torchtune PR 2172
kind: mean-of-means
"""

import torch
from pieces import Tagger, cross_entropy, join, loader, options, replicated, sentences

given = options()
rank, world = join(given.seed)
model = replicated(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for tokens, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(tokens), labels).backward()
        optimizer.step()
