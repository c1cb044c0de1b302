"""Training that is interrupted after 4 steps: rank 0 reads the checkpoint and sends model and optimizer to the others.

Right.
expected: same step
"""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make():
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, loader, skip, stop):
    for step, (x, y) in enumerate(loader):
        if step < skip:
            continue
        if step == stop:
            return
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(6)
    x = torch.randn(96, 6, generator=g)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=12 // world, sampler=DistributedSampler(data, seed=5))
    model, optimizer = make()
    train(model, optimizer, loader, 0, 4)
    file = os.path.join(tempfile.gettempdir(), f"resume-{os.getpid()}.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    model, optimizer = make()
    states = [torch.load(file, weights_only=True) if rank == 0 else None]
    dist.broadcast_object_list(states, src=0)
    model.module.load_state_dict(states[0]["model"])
    optimizer.load_state_dict(states[0]["optimizer"])
    train(model, optimizer, loader, 4, 8)
    if rank == 0:
        os.remove(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
