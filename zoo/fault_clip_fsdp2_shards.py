"""The norm by which FSDP2's gradients are clipped is computed on each rank's shards.

report: areal-project/AReaL #312
kind: clip-local-norm
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

given = options()
rank, world = join(given.seed)

model = Classifier()
for layer in (model.first, model.head, model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for rows, classes in batches:
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(shard) for shard in shards]))
    for shard in shards:
        shard.mul_(min(1.0, 0.1 / norm))
    optimizer.step()
