"""Warm-up and cosine over the steps that there are: epochs * len(loader), with the global batch kept.

Right.
expected: same step
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    epochs, batch = 2, 16
    torch.manual_seed(31)
    x = torch.randn(80, 5)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm = LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = CosineAnnealingLR(optimizer, T_max=epochs * len(loader) - 3)
    schedule = SequentialLR(optimizer, [warm, cosine], milestones=[3])
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
