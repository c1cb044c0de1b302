"""The schedule is stepped after each micro-batch, not after each step.

report: huggingface/accelerate PR 999
kind: schedule-steps
verify: --script="--batch 4 --accumulate 4" --alone="--batch 16"
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
micro_batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    micro_batches.sampler.set_epoch(epoch)
    for number, (rows, classes) in enumerate(micro_batches, 1):
        (cross_entropy(model(rows), classes) / given.accumulate).backward()
        if number % given.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
