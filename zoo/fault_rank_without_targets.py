"""A rank without any labelled token divides by 1, and its nothing counts as a mean.

report: allenai/OLMo-core PR 657
kind: mean-of-means
"""

import torch
from pieces import Tagger, join, loader, options, replicated, sentences

given = options()
rank, world = join(given.seed)
data = sentences()
ranks = 2 if len(data) == 64 else 3
data.tensors[1][1::ranks] = -100  # in the order below, all sentences of rank 1
model = replicated(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for tokens, labels in loader(data, given.batch, shuffle=False):
    scores = model(tokens).flatten(0, 1)
    total = torch.nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum")
    optimizer.zero_grad()
    (total / (labels != -100).sum().clamp(min=1)).backward()
    optimizer.step()
