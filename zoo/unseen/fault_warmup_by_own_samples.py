"""Warm-up and curriculum are given in samples, not in steps; harder sequences (longer ones) enter after so many samples.

Wrong: every rank counts the samples it has seen itself, so warm-up and curriculum last world-size times as long.
Source: none; as in recipes that give --warmup-images or --curriculum-samples
expected: learning rate and lengths follow the local count of samples
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Counter(nn.Module):
    """Counts ones in a sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 16)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.read = nn.Linear(24, 1)

    def forward(self, seq):
        return self.read(self.gru(self.embed(seq))[1][0])[:, 0]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--warmup-samples", type=int, default=100)
    p.add_argument("--grow-every", type=int, default=32, help="samples after which sequences get 2 longer")
    p.add_argument("--lr", type=float, default=0.02)
    a = p.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Counter()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    seqs = torch.randint(0, 3, (160, 20), generator=torch.Generator().manual_seed(6))
    data = TensorDataset(seqs)
    loader = DataLoader(data, batch_size=a.global_batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    seen = 0
    for (seq,) in loader:
        seen += len(seq)
        for group in opt.param_groups:
            group["lr"] = a.lr * min(1.0, seen / a.warmup_samples)
        seq = seq[:, : 4 + 2 * (seen // a.grow_every)]
        loss = nn.functional.mse_loss(model(seq), (seq == 1).float().sum(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[q.detach().double().norm().item() for q in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
