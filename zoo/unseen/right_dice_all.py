"""Segmentation with a soft Dice loss over the whole batch of all ranks plus cross entropy, DDP.

Right: the sums of the ratio go through an all-reduce with a gradient (whose backward sums over ranks), so DDP's mean gives the batch's
gradient; the loss isn't multiplied by the world size. (Twin of fault_dice_local.py.)
Source: https://github.com/MIC-DKFZ/nnUNet/issues/1354
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Discs(Dataset):
    def __init__(self, n=64, size=12):
        g = torch.Generator().manual_seed(45)
        grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
        centre = torch.rand(n, 2, 1, 1, generator=g) * size
        radius = torch.rand(n, 1, 1, generator=g) * 5 * (torch.arange(n) % 2)[:, None, None]  # every second image is empty
        self.mask = ((grid - centre).norm(dim=1) < radius).float()
        self.image = self.mask + 0.7 * torch.randn(n, size, size, generator=g)

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, i):
        return self.image[i, None], self.mask[i, None]


def dice_loss(logits, mask, smooth=1.0):
    p = logits.sigmoid()
    sums = torch.stack([(p * mask).sum(), p.sum() + mask.sum()])
    if dist.is_initialized():
        sums = dist_fn.all_reduce(sums)
    return 1 - (2 * sums[0] + smooth) / (sums[1] + smooth)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    data = Discs()
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True)):
        logits = model(x)
        loss = dice_loss(logits, y) + 0.1 * nn.functional.binary_cross_entropy_with_logits(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
