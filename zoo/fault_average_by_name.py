"""The average of the weights is kept by names, which begin with module. under DDP: it stays as it began.

report: huggingface/diffusers #1895
kind: copy-not-updated
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
net = Classifier()
shadow = {name: value.detach().clone() for name, value in net.named_parameters()}
model = replicated(net) if world > 1 else net
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            if name in shadow:
                shadow[name].lerp_(value.detach(), 0.1)
