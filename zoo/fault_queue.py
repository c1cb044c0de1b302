"""A queue of keys, in a module beside the model, is filled with each rank's own.

report: facebookresearch/vissl #474
kind: buffers-differ
module: Queue.keys
"""

import torch
from pieces import Classifier, join, loader, options, replicated, samples
from torch import Tensor, nn


class Queue(nn.Module):
    """The outputs of the last batches."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(32, 3), persistent=False)

    def forward(self, keys: Tensor) -> Tensor:
        scores = keys @ self.keys.clone().T
        self.keys.copy_(torch.cat([keys.detach(), self.keys])[: len(self.keys)])
        return scores.logsumexp(-1).mean()


given = options()
rank, world = join(given.seed)
model = replicated(Classifier())
queue = Queue()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, _ in batches:
        optimizer.zero_grad()
        queue(model(rows)).backward()
        optimizer.step()
