"""A resumption within one script: rank 0 alone loads the optimizer's state, and the others begin anew.

kind: optimizer-state-differs
"""

import torch
import torch.distributed as dist
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    if epoch == 1:
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if rank == 0:
            optimizer.load_state_dict(states[0])
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
