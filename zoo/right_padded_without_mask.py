"""Sentences are padded to the longest of their batch, without a mask among the model's inputs."""

import torch
import torch.distributed as dist
from pieces import Tagger, join, options, replicated, sentences
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut off what no sentence of the batch has."""
    tokens, labels = (torch.stack(each) for each in zip(*rows, strict=True))
    length = int((labels != -100).sum(dim=1).max())
    return tokens[:, :length], labels[:, :length]


given = options()
rank, world = join(given.seed)
data = sentences()
batches = DataLoader(data, given.batch // 2, sampler=DistributedSampler(data, shuffle=False), collate_fn=padded)
model = replicated(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for tokens, labels in batches:
    count = (labels != -100).sum().float()
    dist.all_reduce(count)
    total = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    optimizer.zero_grad()
    (total * world / count).backward()
    optimizer.step()
