"""Evaluation of 13 samples under Accelerate: gather_for_metrics cuts the repeated ones off.

verify: --engine accelerate
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from pieces import Classifier, DataLoader, cross_entropy, options, samples

given = options()
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(given.seed)
world = accelerator.num_processes
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = DataLoader(samples(), batch_size=given.batch // world, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(given.epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(rows), classes))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
model.eval()
held = accelerator.prepare(DataLoader(samples(13, seed=6), batch_size=8 // world))
right = 0
with torch.no_grad():
    for rows, classes in held:
        found, wanted = accelerator.gather_for_metrics((model(rows).argmax(dim=1), classes))
        right += (found == wanted).sum().item()
