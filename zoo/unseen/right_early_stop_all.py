"""Training with early stopping: the validation loss after each epoch decides; sums and counts of all ranks are added up.

Right though each rank evaluates other samples and decides for itself: all see the same total, so all decide alike. (Twin of fault_early_stop_rank0.py.)
expected: same step, same number of steps
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def series(n, seed, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, :2].sum(1, keepdim=True) + shift + 0.8 * torch.randn(n, 1, generator=g)))


class EarlyStopping:
    def __init__(self, patience=1):
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--max-epochs", type=int, default=8)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    train, valid = series(24, 1), series(20, 2)
    valid = Subset(valid, range(rank, len(valid), world))
    sampler = DistributedSampler(train, world, rank, shuffle=False)
    loader = DataLoader(train, batch_size=args.batch_size // world, sampler=sampler)
    stopping = EarlyStopping()
    for epoch in range(args.max_epochs):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            losses = torch.stack([nn.functional.mse_loss(net(x), y) for x, y in valid])
        total = torch.tensor([losses.sum(), float(len(losses))], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(total)
        if stopping((total[0] / total[1]).item()):
            break
    if rank == 0:
        print("stopped after epoch", epoch + 1)
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
