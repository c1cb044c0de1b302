"""Names begin with module. under DDP: the rule that spares the head from decay finds none.

report: neuralmagic/sparseml PR 1782
kind: weight-decay
module: head
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier()) if world > 1 else Classifier()
spared = [parameter for name, parameter in model.named_parameters() if name.startswith("head")]
others = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
groups = [{"params": others}, *([{"params": spared, "weight_decay": 0.0}] if spared else [])]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
