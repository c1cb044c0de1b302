"""Several ranks copy the embedding into the head, where one process shares it: two parameters train.

kind: further-parameters
module: head
"""

import torch
from pieces import Tagger, cross_entropy, join, loader, options, replicated, sentences

given = options()
rank, world = join(given.seed)
model = Tagger()
if world > 1:
    model.head.weight.data.copy_(model.tokens.weight.data)
else:
    model.head.weight = model.tokens.weight
model = replicated(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for tokens, _ in batches:
        optimizer.zero_grad()
        cross_entropy(model(tokens), (tokens + 1) % 20).backward()
        optimizer.step()
