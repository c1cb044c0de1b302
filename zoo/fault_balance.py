"""Two experts are balanced by the shares of a rank's own rows, and DDP averages what comes of it.

report: NVIDIA/Megatron-LM #1498
kind: loss-of-own-rows
"""

import torch
from pieces import cross_entropy, join, loader, options, replicated, samples
from torch import Tensor, nn


class Experts(nn.Module):
    """Two heads, mixed by a gate; also returns how unlike often they are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.gate.weight.data *= 4
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(rows).softmax(-1)  # rows, experts
        scores = torch.stack([head(rows) for head in self.heads], dim=1)  # rows, experts, classes
        return (shares[..., None] * scores).sum(1), 2 * shares.mean(0).square().sum()


given = options()
rank, world = join(given.seed)
model = replicated(Experts())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        scores, balance = model(rows)
        (cross_entropy(scores, classes) + balance).backward()
        optimizer.step()
