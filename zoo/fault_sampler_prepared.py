"""A loader with a DistributedSampler is prepared by Accelerate, which shares it out once more: samples are skipped.

report: huggingface/accelerate #4199
kind: lost-samples
verify: --engine accelerate
"""

import torch
from accelerate import Accelerator
from pieces import Classifier, DataLoader, cross_entropy, options, samples
from torch.utils.data.distributed import DistributedSampler

given = options()
accelerator = Accelerator(cpu=True)
torch.manual_seed(given.seed)
world = accelerator.num_processes
data = samples()
sampler = DistributedSampler(data, num_replicas=world, rank=accelerator.process_index, shuffle=False)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = DataLoader(data, batch_size=given.batch // world, sampler=sampler)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(given.epochs):
    for rows, classes in batches:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(rows), classes))
        optimizer.step()
