"""A teacher that is copied from what DDP has broadcast, and follows it."""

import copy

import torch
from pieces import Classifier, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
torch.manual_seed(given.seed + rank)
net = Classifier()
model = replicated(net)
teacher = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, _ in batches:
        with torch.no_grad():
            goal = teacher(rows).softmax(dim=-1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows * 1.1), goal).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
