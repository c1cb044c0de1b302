"""Unbalanced classes: a WeightedRandomSampler draws with replacement.

Wrong: the sampler knows nothing of ranks, and all ranks have one seed: each draws the same samples.
Source: https://github.com/pytorch/pytorch/issues/23430
expected: every rank trains on the same samples
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def build():
    g = torch.Generator().manual_seed(21)
    x = torch.randn(200, 6, generator=g)
    y = (torch.rand(200, generator=g) < 0.15).long()
    return TensorDataset(x + y[:, None], y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(123)
    data = build()
    labels = data.tensors[1]
    weights = (1.0 / torch.bincount(labels).float())[labels]
    sampler = WeightedRandomSampler(weights, num_samples=160)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
