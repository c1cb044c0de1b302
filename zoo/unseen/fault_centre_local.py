"""Self-distillation in DINO's way: the teacher's outputs are centred by a moving average, sharpened, and matched by the student.

Wrong: the centre is updated with the mean of the rank's own outputs, so the ranks' centres differ.
Source: compare https://github.com/espnet/espnet/pull/6284 (statistics kept in a module without a reduction); DINO's code reduces here
expected: moving average (centre) of local outputs
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Loss(nn.Module):
    def __init__(self, dim, momentum=0.6):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, dim))
        self.momentum = momentum

    def forward(self, student, teacher):
        goal = ((teacher - self.centre) / 0.1).softmax(-1)
        self.update(teacher)
        return -(goal * (student / 0.3).log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def update(self, teacher):
        self.centre.lerp_(teacher.mean(0, keepdim=True), 1 - self.momentum)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(23)
    net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 12))
    teacher = copy.deepcopy(net).requires_grad_(False)
    student = DDP(net) if world > 1 else net
    criterion = Loss(12)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(24)
    x = torch.randn(128, 10, generator=g)
    data = TensorDataset(x + 0.2 * torch.randn(128, 10, generator=g), x + 0.2 * torch.randn(128, 10, generator=g))
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for step, (small, large) in enumerate(loader):
        loss = criterion(student(small), teacher(large))
        opt.zero_grad()
        loss.backward()
        opt.step()
        m = 0.9 + 0.1 * step / len(loader)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), net.parameters()):
                t.mul_(m).add_(s, alpha=1 - m)
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
        print("ema", *[p.detach().double().norm().item() for p in teacher.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
