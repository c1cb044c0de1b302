"""Each rank shuffles the whole data with a seed of its own: samples come twice, others never.

report: yangkky/distributed_tutorial #5
kind: repeated-samples
"""

import torch
from pieces import Classifier, DataLoader, cross_entropy, join, options, replicated, samples

given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = samples()
shuffled = DataLoader(
    data, batch_size=given.batch // world, shuffle=True, generator=torch.Generator().manual_seed(given.seed + rank)
)
for step, (rows, classes) in enumerate(shuffled):
    if step == len(data) // given.batch:
        break
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
