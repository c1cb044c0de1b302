"""Unbalanced classes: all ranks draw one list of samples with replacement by (seed, epoch), and each takes every world-th of it.

Right: together they train on the list that one process draws.
expected: same step
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, total, seed=0):
        self.weights, self.total, self.seed, self.epoch = weights, total, seed, 0

    def __len__(self):
        return self.total // dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        drawn = torch.multinomial(self.weights, self.total, replacement=True, generator=g).tolist()
        self.epoch += 1
        return iter(drawn[dist.get_rank() :: dist.get_world_size()])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(123)
    g = torch.Generator().manual_seed(21)
    x = torch.randn(200, 6, generator=g)
    y = (torch.rand(200, generator=g) < 0.15).long()
    data = TensorDataset(x + y[:, None], y)
    weights = (1.0 / torch.bincount(y).float())[y]
    loader = DataLoader(
        data, batch_size=16 // dist.get_world_size(), sampler=DistributedWeightedSampler(weights, 160, seed=3)
    )
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
