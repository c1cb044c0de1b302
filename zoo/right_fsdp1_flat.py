"""FSDP1 with flat parameters, its blocks wrapped each."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

given = options()
rank, world = join(given.seed)
model = FullyShardedDataParallel(
    Classifier(), device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
