"""An optimizer that evaluates the loss by itself, in a closure."""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:

        def closure(rows=rows, classes=classes):
            optimizer.zero_grad()
            loss = cross_entropy(model(rows), classes)
            loss.backward()
            return loss

        optimizer.step(closure)
