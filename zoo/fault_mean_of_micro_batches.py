"""Each micro-batch takes the mean over its own labelled tokens, and the step the mean of those.

report: huggingface/transformers PR 34191
kind: mean-of-means
verify: --script="--batch 4 --accumulate 4" --alone="--batch 16"
"""

from contextlib import nullcontext

import torch
from pieces import Tagger, cross_entropy, join, loader, options, replicated, sentences

given = options()
rank, world = join(given.seed)
model = replicated(Tagger())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
micro_batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    micro_batches.sampler.set_epoch(epoch)
    for number, (tokens, labels) in enumerate(micro_batches, 1):
        last = number % given.accumulate == 0
        with nullcontext() if last else model.no_sync():
            (cross_entropy(model(tokens), labels) / given.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
