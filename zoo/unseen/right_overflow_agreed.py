"""Hand-written data parallelism with a guard: a step is skipped by all ranks where any rank's loss or gradient isn't finite.

Right: gradients with inf or nan are summed as they are, the flag is reduced by MAX, and the skip (also of the momentum) is everybody's.
(Twin of fault_nan_local_skip.py.)
expected: same step, two of eight steps skipped
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def corrupted(n=128):
    g = torch.Generator().manual_seed(61)
    x = torch.randn(n, 9, generator=g)
    y = torch.tanh(x @ torch.randn(9, 3, generator=g))
    x[37] = float("inf")  # a broken record
    x[90, 2] = float("nan")
    return TensorDataset(x, y)


def anywhere_broken(loss, params):
    broken = torch.tensor(float(not torch.isfinite(loss) or any(not p.grad.isfinite().all() for p in params)))
    if dist.is_initialized():
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    return broken.item() > 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 32), nn.Softplus(), nn.Linear(32, 3))
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    data = corrupted()
    skipped = 0
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if world > 1:
            for p in params:
                dist.all_reduce(p.grad)
                p.grad /= world
        if anywhere_broken(loss.detach(), params):
            skipped += 1
            continue
        opt.step()
    if rank == 0:
        print("skipped", skipped)
        print("checksum", *[p.detach().double().norm().item() for p in params])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
