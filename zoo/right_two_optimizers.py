"""A generator and a discriminator, each with an optimizer, each in DDP."""

import torch
from pieces import join, loader, options, replicated, samples
from torch import nn

given = options()
rank, world = join(given.seed)

drawn = replicated(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
judge = replicated(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
of_drawn = torch.optim.SGD(drawn.parameters(), lr=0.05)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.05)
loss = nn.BCEWithLogitsLoss()
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, _ in batches:
        made = drawn(rows[:, :4])
        of_judge.zero_grad()
        loss(judge(rows), torch.ones(len(rows), 1)).backward()
        loss(judge(made.detach()), torch.zeros(len(rows), 1)).backward()
        of_judge.step()
        of_drawn.zero_grad()
        loss(judge(made), torch.ones(len(rows), 1)).backward()
        of_drawn.step()
