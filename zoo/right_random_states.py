"""A resumption within one script: each rank goes on with its own random numbers.

verify: --dropout
"""

import torch
import torch.distributed as dist
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier(dropout=0.5))
torch.manual_seed(given.seed + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    if epoch == 1:
        state = {"random": torch.get_rng_state(), "optimizer": optimizer.state_dict()}
        states = [state]
        dist.broadcast_object_list(states, 0)
        torch.set_rng_state(state["random"])
        optimizer.load_state_dict(states[0]["optimizer"])
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
