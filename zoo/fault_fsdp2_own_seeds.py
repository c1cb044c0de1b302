"""Each rank draws its weights with a seed of its own, and FSDP2 broadcasts nothing: shards of unlike models.

report: allenai/OLMo-core PR 319
kind: weights-not-broadcast
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

given = options()
rank, world = join(given.seed)
torch.manual_seed(given.seed + rank)
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
        optimizer.step()
