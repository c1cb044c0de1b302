"""A schedule that Accelerate has prepared makes a step for every process, though the script counts its own steps.

report: huggingface/accelerate #2142
kind: schedule-steps
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
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
batches = DataLoader(samples(), batch_size=given.batch // world, shuffle=True)
model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
for _ in range(given.epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(rows), classes))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
