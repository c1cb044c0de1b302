"""The body is in DDP, and the head beside it is not: each rank has a head of its own.

report: moojink/openvla-oft #160
kind: parameter-not-reduced
module: head
"""

import torch
from pieces import cross_entropy, join, loader, options, replicated, samples
from torch import nn


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, rows):
        return torch.tanh(self.norm(self.first(rows)))


class Whole(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, rows):
        return self.head(self.body(rows))


given = options()
rank, world = join(given.seed)
model = Whole(replicated(Body()), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
