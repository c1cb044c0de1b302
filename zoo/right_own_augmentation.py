"""Samples are augmented at random, from a seed of each rank's own."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.utils.data import Dataset


class Noisy(Dataset):
    """Rows with noise that is drawn whenever a row is asked for."""

    def __init__(self) -> None:
        self.data = samples()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, classes = self.data[number]
        return rows + 0.1 * torch.randn(8), classes


given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
torch.manual_seed(given.seed + 1 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(Noisy(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
