"""Cross entropy with weights of classes divides by the weights of a rank's own rows, and DDP averages those means.

report: pytorch/pytorch #61309
kind: mean-of-means
"""

import torch
from pieces import Classifier, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 9.0]))
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        loss(model(rows), classes).backward()
        optimizer.step()
