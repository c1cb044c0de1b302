"""Two-stage fine-tuning: the encoder is frozen for the first steps, then unfrozen; one optimizer holds everything from the beginning.

Wrong: DDP registers its hooks for parameters that require a gradient when it is made; the encoder, frozen then, is never reduced afterwards.
Source: https://github.com/NVIDIA/apex/pull/46 (the same restriction), PyTorch's documentation of DistributedDataParallel
expected: gradients of parameters unfrozen later aren't synchronised
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        self.classifier = nn.Linear(16, 5)

    def forward(self, x):
        return self.classifier(self.encoder(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--unfreeze-at", type=int, default=3)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(33)
    net = Model()
    net.encoder.requires_grad_(False)
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    g = torch.Generator().manual_seed(34)
    data = TensorDataset(torch.randn(128, 12, generator=g), torch.randint(0, 5, (128,), generator=g))
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=1)
    for step, (x, y) in enumerate(DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)):
        if step == args.unfreeze_at:
            net.encoder.requires_grad_(True)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
