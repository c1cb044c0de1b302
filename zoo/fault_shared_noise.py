"""All ranks have one seed, and pair their own samples with the same noise and the same times.

report: Robbyant/lingbot-vla-v2 #41
kind: equal-draws
"""

import torch
from pieces import join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for clean, _ in batches:
        noise, times = torch.randn_like(clean), torch.rand(len(clean), 1)
        guess = model(torch.cat([(1 - times) * noise + times * clean, times], dim=1))
        optimizer.zero_grad()
        (guess - (clean - noise)).square().mean().backward()
        optimizer.step()
