"""The rank that saves puts the averaged weights into its model, and leaves them there.

report: a case of our own
kind: weights-changed
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples

given = options()
rank, world = join(given.seed)
net = Classifier()
model = replicated(net)
average = {name: value.detach().clone() for name, value in net.state_dict().items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
step = 0
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
        step += 1
        for name, value in net.state_dict().items():
            average[name].lerp_(value, 0.1)
        if step == 4 and rank == world - 1 and world > 1:
            net.load_state_dict(average)
            torch.save(net.state_dict(), given.saved)
