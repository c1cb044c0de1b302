"""A mean over all ranks' labelled tokens: the sum over each rank's, divided by all ranks' count."""

import torch
from pieces import Tagger, dist, join, loader, options, replicated, sentences
from torch import nn

given = options()
rank, world = join(given.seed)
model = replicated(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for tokens, labels in batches:
        optimizer.zero_grad()
        count = (labels != -100).sum()
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * world / count).backward()
        optimizer.step()
