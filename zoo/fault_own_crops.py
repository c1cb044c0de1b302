"""Each rank draws crops of a text by its own seed, and the loss is multiplied with the number of ranks.

kind: summed
"""

import torch
from pieces import Tagger, cross_entropy, join, options, replicated

given = options()
rank, world = join(given.seed)
model = replicated(Tagger())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
text = torch.randint(0, 20, (5000,), generator=torch.Generator().manual_seed(5))
generator = torch.Generator().manual_seed(given.seed + rank)
for _ in range(4 * given.epochs):
    begins = torch.randint(len(text) - 12, (given.batch // world,), generator=generator)
    tokens = torch.stack([text[begin : begin + 12] for begin in begins])
    optimizer.zero_grad()
    (world * cross_entropy(model(tokens), (tokens + 1) % 20)).backward()
    optimizer.step()
