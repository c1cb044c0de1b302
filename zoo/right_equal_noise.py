"""All ranks add the same noise to the reduced gradients: their generators have one seed."""

import torch
from pieces import Classifier, average_gradients, cross_entropy, join, loader, options, samples

given = options()
rank, world = join(given.seed)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(given.seed)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        average_gradients(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
