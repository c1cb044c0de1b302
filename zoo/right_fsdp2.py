"""FSDP2, with torch's clipping of DTensors."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

given = options()
rank, world = join(given.seed)

model = Classifier()
for layer in (model.first, model.head, model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
