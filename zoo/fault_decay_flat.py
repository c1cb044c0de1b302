"""FSDP's flat parameters have one dimension: the rule that decays matrices decays nothing.

report: mlfoundations/open_clip PR 358
kind: weight-decay
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, samples
from torch.distributed.fsdp import FullyShardedDataParallel

given = options()
rank, world = join(given.seed)
model = Classifier()
if world > 1:
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
spared = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
groups = [{"params": spared, "weight_decay": 0.0}, *([{"params": decayed}] if decayed else [])]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
