"""The gradient of a weight that two layers share is reduced once for each: summed twice.

report: NVIDIA/Megatron-LM #844
kind: some-gradients-scaled
module: tokens.weight
"""

import torch
from pieces import Tagger, cross_entropy, dist, join, loader, options, sentences
from torch import nn

given = options()
rank, world = join(given.seed)
model = Tagger()
model.head.weight = nn.Parameter(torch.randn(20, 16) * 0.1)
model.tokens.weight = model.head.weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows)[..., :3], classes[:, :1].clamp(0, 2).expand(-1, 12)).backward()
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                dist.all_reduce(parameter.grad)
        for parameter in model.parameters():
            parameter.grad /= world
        optimizer.step()
