"""Each rank shifts the labels of its own part of a sequence: the last token of a part has no label.

report: huggingface/transformers PR 37993
kind: lost-targets
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
        part = tokens[:, rank * own : (rank + 1) * own]
        labels = torch.cat([part[:, 1:], torch.full_like(part[:, :1], -100)], dim=1)
        scores = model(part, rank * own, rank * own)
        loss = torch.nn.functional.cross_entropy(scores.mT, labels, reduction="sum")
        optimizer.zero_grad()
        (loss / (tokens.numel() - len(tokens))).backward()
        summed_gradients(model)
        optimizer.step()
