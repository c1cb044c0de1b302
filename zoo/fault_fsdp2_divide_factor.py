"""FSDP2's divide factor is set to 1, though the loss is the mean over a rank's own rows.

report: pytorch/pytorch #155903
kind: summed
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

given = options()
rank, world = join(given.seed)
mesh = init_device_mesh("cpu", (world,))
model = Classifier()
for layer in (model.first, model.head, model):
    fully_shard(layer, mesh=mesh)
for layer in (model.first, model.head, model):
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
