"""Dropout that is recomputed in backward without the state of its generator has other masks there.

report: allenai/OLMo-core PR 828
kind: backward-differs
verify: --dropout
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.utils.checkpoint import checkpoint


class Recomputed(Classifier):
    """Its middle is recomputed in backward, with other masks."""

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.norm(values)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = self.first(rows)
        return self.head(checkpoint(self.middle, values, use_reentrant=False, preserve_rng_state=False))


given = options()
rank, world = join(given.seed)
model = replicated(Recomputed(dropout=0.2) if world > 1 else Classifier(dropout=0.2))
torch.manual_seed(1000 + given.seed + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()
