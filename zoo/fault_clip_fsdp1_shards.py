"""torch's clip_grad_norm_ on the shards of FSDP: each rank has the norm of its own.

report: pytorch/pytorch #72548
kind: clip-local-norm
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.fsdp import FullyShardedDataParallel

given = options()
rank, world = join(given.seed)
model = FullyShardedDataParallel(Classifier(), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
