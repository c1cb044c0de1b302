"""A regressor gets a second head after some steps (progressive training); the model is wrapped anew and the optimizer extended.

Right: the new DDP knows the new parameters; momentum of the old ones is kept, since the optimizer is extended, not replaced.
(Twin of fault_head_added_later.py.)
Source: https://github.com/pytorch/pytorch/issues/12603
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.mean = nn.Linear(32, 1)
        self.log_var = None

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h), self.log_var(h) if self.log_var is not None else torch.zeros(len(x), 1)


def nll(mean, log_var, y):
    return 0.5 * (log_var + (y - mean).pow(2) * torch.exp(-log_var)).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--second-stage", type=int, default=4)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(160, 6, generator=g)
    y = x[:, :1] + x[:, 1:2].exp() * torch.randn(160, 1, generator=g) * 0.3
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for step, (bx, by) in enumerate(loader):
        if step == args.second_stage:
            net.log_var = nn.Linear(32, 1)
            nn.init.zeros_(net.log_var.weight)
            nn.init.zeros_(net.log_var.bias)
            opt.add_param_group({"params": net.log_var.parameters()})
            model = DDP(net) if world > 1 else net
        opt.zero_grad()
        nll(*model(bx), by).backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
