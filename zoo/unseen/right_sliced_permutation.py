"""A sampler of one's own: all ranks draw the same permutation per epoch, cut it into global batches and take a contiguous slice of each.

Right though every rank seeds the permutation alike (no rank in the seed), and the rows of a rank aren't those DistributedSampler would give.
The last, incomplete global batch is dropped on all ranks alike. One process takes the whole of each batch.
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n=53):
        g = torch.Generator().manual_seed(99)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.x = torch.randn(4, 20, generator=g)[self.labels] + torch.randn(n, 20, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return self.x[idx], self.labels[idx]


class SlicedBatches:
    def __init__(self, length, global_batch, rank, world, seed=0):
        assert global_batch % world == 0
        self.length, self.global_batch, self.rank, self.world, self.seed = length, global_batch, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return self.length // self.global_batch

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed * 1000 + self.epoch))
        for b in order[: len(self) * self.global_batch].view(-1, self.global_batch):
            yield b.chunk(self.world)[self.rank].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    model = DistributedDataParallel(net) if world > 1 else net
    data = Blobs()
    batches = SlicedBatches(len(data), args.global_batch, rank, world, seed=4)
    loader = DataLoader(data, batch_sampler=batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(args.epochs):
        batches.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
