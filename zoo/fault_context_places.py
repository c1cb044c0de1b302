"""Places of tokens begin with 0 on each rank that has a part of the sequence.

kind: forward-differs
module: attention
"""

import torch
from context_pieces import LENGTH, Writer, summed_gradients, texts
from pieces import join, options

given = options()
rank, world = join(given.seed)
own = LENGTH // world
model = Writer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(given.epochs):
    for (tokens,) in texts(given.batch):
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
        mine = slice(rank * own, (rank + 1) * own)
        scores = model(tokens[:, mine], rank * own, 0)
        loss = torch.nn.functional.cross_entropy(scores.mT, labels[:, mine], reduction="sum")
        optimizer.zero_grad()
        (loss / (labels != -100).sum()).backward()
        summed_gradients(model)
        optimizer.step()
