"""Names begin with module. under DDP: the rule that gives the body a smaller rate finds nothing.

report: huggingface/diffusers #1895
kind: other-group
module: first
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier()) if world > 1 else Classifier()
slow = [parameter for name, parameter in model.named_parameters() if name.startswith("first")]
others = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
groups = [{"params": others}, *([{"params": slow, "lr": 0.001}] if slow else [])]
optimizer = torch.optim.AdamW(groups, lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
