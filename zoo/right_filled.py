"""A model that was made on the meta device, given memory, and filled by its layers."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
with torch.device("meta"):
    model = Classifier()
model.to_empty(device="cpu")
torch.manual_seed(given.seed)
model.first.reset_parameters()
model.norm.reset_parameters()
model.head.reset_parameters()
model = replicated(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
