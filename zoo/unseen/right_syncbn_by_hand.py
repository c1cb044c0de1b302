"""A small image classifier with a home-made synchronised batch normalisation (SyncBatchNorm doesn't run on CPU).

Right: mean and mean square are summed over ranks by a collective with a gradient, and divided by all ranks' counts. DDP's mean of the
gradients is then that of the whole batch. buffers aren't broadcast, but every rank computes the same. (Twin of fault_batchnorm_local.py.)
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


class SyncBN(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        stats = torch.cat([x.sum((0, 2, 3)), x.pow(2).sum((0, 2, 3)), x.new_tensor([x.numel() / x.shape[1]])])
        if dist.is_initialized():
            stats = dist_fn.all_reduce(stats)
        count = stats[-1].detach()
        mean, square = (stats[:-1] / count).chunk(2)
        var = square - mean.pow(2)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        view = (1, -1, 1, 1)
        x = (x - mean.view(view)) * torch.rsqrt(var + self.eps).view(view)
        return x * self.weight.view(view) + self.bias.view(view)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), SyncBN(o), nn.ReLU())


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
    model = DDP(net, broadcast_buffers=False) if world > 1 else net
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
