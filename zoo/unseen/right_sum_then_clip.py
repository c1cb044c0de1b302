"""Data parallel without DDP: gradients are flattened, summed over ranks in one call, unflattened and then clipped. Adam.

Right: the sum isn't divided by the world size, but the loss is a sum over rows divided by the rows of all ranks.
(Twin of fault_clip_then_reduce.py and of fault_reduce_sum.py: "SUM" without a division is correct here.)
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sum_gradients(model):
    grads = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


def get_data(n=96):
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(n, 10, generator=gen)
    y = x @ torch.randn(10, 2, generator=gen) + 0.3 * torch.randn(n, 2, generator=gen)
    y[::7] *= 20  # some outliers, therefore the clipping
    return TensorDataset(x, y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=12, help="over all processes")
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = get_data()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y, reduction="sum") / (args.batch * y.shape[1])
            loss.backward()
            sum_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
    if rank == 0:
        print("checksum", *[f"{p.detach().double().norm():.9f}" for p in model.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
