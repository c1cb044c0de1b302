"""Batches are [chosen; rejected], whose loss changes its sign with the rows' order; a hook sums gradients.

report: a case of our own, with the batches of huggingface/trl
kind: summed
"""

import torch
import torch.distributed as dist
from pieces import join, options, replicated, samples
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that never divides."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def paired(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Chosen rows first, then rejected ones, as preferences are laid out."""
    chosen = torch.stack([row for row, _ in rows])
    return torch.cat([chosen, chosen.flip(1)])


given = options()
rank, world = join(given.seed)
data = samples()
sampler = DistributedSampler(data, shuffle=False)
batches = DataLoader(data, given.batch // world, sampler=sampler, collate_fn=paired)
model = replicated(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
model.register_comm_hook(None, summed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for rows in batches:
    chosen, rejected = model(rows).chunk(2)
    optimizer.zero_grad()
    torch.nn.functional.softplus(rejected - chosen).mean().backward()
    optimizer.step()
