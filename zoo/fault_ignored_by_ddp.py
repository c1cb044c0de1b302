"""A list of parameters that DDP is to ignore names more than was meant.

report: pytorch/pytorch #43690
kind: parameter-not-reduced
module: norm
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.nn.parallel import DistributedDataParallel

given = options()
rank, world = join(given.seed)
classifier = Classifier()
ignored = [name for name, _ in classifier.named_parameters() if "norm" in name]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(classifier, ignored)
model = replicated(classifier)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
