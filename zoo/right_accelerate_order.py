"""Accelerate as it comes, without a seedable sampler: its order depends on the number of processes.

verify: --engine accelerate
"""

import torch
from accelerate import Accelerator
from pieces import Classifier, DataLoader, cross_entropy, options, samples

given = options()
accelerator = Accelerator(cpu=True)
torch.manual_seed(given.seed)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = DataLoader(samples(96), batch_size=8, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(given.epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(rows), classes))
        optimizer.step()
