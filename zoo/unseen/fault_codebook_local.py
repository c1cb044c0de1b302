"""A vector-quantised autoencoder; the codebook is a buffer updated by exponential moving averages of the assigned vectors (DDP, broadcast_buffers=False).

Wrong: counts and sums for the update are those of the rank's own batch: each rank has a codebook of its own.
Source: https://github.com/espnet/espnet/pull/6284, https://github.com/ZhikangNiu/encodec-pytorch/issues/15
expected: codebook (buffers) updated by local data
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    def __init__(self, codes=8, dim=4, decay=0.7):
        super().__init__()
        self.decay = decay
        start = torch.randn(codes, dim)
        self.register_buffer("codes", start.clone())
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", start.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            hot = nn.functional.one_hot(index, len(self.codes)).float()
            self.update(hot.sum(0), hot.T @ z.detach())
        return z + (q - z).detach(), (z - q.detach()).pow(2).mean()

    @torch.no_grad()
    def update(self, count, total):
        self.count.lerp_(count, 1 - self.decay)
        self.total.lerp_(total, 1 - self.decay)
        self.codes.copy_(self.total / self.count.clamp(min=1e-3)[:, None])


class VQAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(10, 4), Codebook(), nn.Linear(4, 10)

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return self.dec(q), commit


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--beta", type=float, default=0.25)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(14)
    net = VQAE()
    model = DDP(net, broadcast_buffers=False) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(128, 10, generator=torch.Generator().manual_seed(14)))
    for (x,) in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        y, commit = model(x)
        loss = (y - x).pow(2).mean() + args.beta * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[v.detach().double().norm().item() for v in net.state_dict().values()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
