"""Training that is interrupted after 4 steps and goes on from its checkpoint.

Wrong: the optimizer's state is loaded on rank 0 only; the other ranks go on with empty momenta, so replicas go apart.
Source: https://github.com/pytorch/fairseq/issues/1205
expected: after the resumption ranks make other updates of equal gradients
"""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(world, rank):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(8, 12, 6, generator=g)
    for step in range(8):
        part = x[step].chunk(world)[rank]
        yield part, part.sin().sum(1, keepdim=True)


def make():
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    file = os.path.join(place[0], "checkpoint.pt")
    model, optimizer = make()
    for step, (x, y) in enumerate(batches(world, rank)):
        if step == 4:
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            dist.barrier()
            model, optimizer = make()
            saved = torch.load(file)
            model.module.load_state_dict(saved["model"])
            if rank == 0:
                optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
