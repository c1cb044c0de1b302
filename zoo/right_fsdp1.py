"""FSDP1 with its own clipping and original parameters."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.fsdp import FullyShardedDataParallel

given = options()
rank, world = join(given.seed)
model = FullyShardedDataParallel(Classifier(), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
