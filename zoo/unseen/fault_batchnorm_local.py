"""A small image classifier with batch normalisation, trained with DDP on small batches per rank.

Wrong: the batch statistics are each rank's own (no conversion to SyncBatchNorm), and running statistics are those of rank 0.
Source: the classic; PyTorch's documentation of DistributedDataParallel and SyncBatchNorm
expected: normalised by the statistics of a part of the batch
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    """Images whose brightness and contrast vary a lot."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(13)
        self.y = torch.randint(0, 2, (n,), generator=g)
        base = torch.arange(8.0).remainder(2).expand(8, 8) * 2 - 1
        img = torch.stack([base if y else base.T for y in self.y])
        self.x = img * (torch.rand(n, 1, 1, generator=g) * 3) + torch.randn(n, 1, 1, generator=g) * 2 + 0.5 * torch.randn(n, 8, 8, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i, None], self.y[i]


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(block(1, 6), block(6, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    data = Stripes()
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=2))
    model.train()
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    if rank == 0:
        print("checksum", *[t.detach().double().norm().item() for t in net.state_dict().values()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
