"""Autocast to bfloat16, and a hook that divides the head's gradient by the ranks once more.

kind: backward-differs
"""

import torch
from pieces import Tagger, cross_entropy, join, loader, options, replicated, sentences

given = options()
rank, world = join(given.seed)
model = replicated(Tagger())
for parameter in model.module.head.parameters():
    parameter.register_hook(lambda gradient: gradient / world)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(sentences().tensors[0])
batches = loader(data, given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for (tokens,) in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(tokens)
        cross_entropy(scores.float(), (tokens * 3 + 1) % 20).backward()
        optimizer.step()
