"""A stream of samples is read by every rank from its beginning.

report: huggingface/transformers PR 11254
kind: same-samples
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for rows, classes in DataLoader(Stream(), batch_size=given.batch // world):
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
