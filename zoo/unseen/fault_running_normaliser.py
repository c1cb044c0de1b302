"""Value regression in RL style: targets are normalised by running mean and standard deviation kept in buffers (as a RunningMeanStd).

Wrong: each rank updates its running statistics with its own targets only, so ranks regress on differently scaled targets.
Source: none; home-made RunningMeanStd under data parallelism (compare https://github.com/espnet/espnet/pull/6284 for codebook statistics)
expected: buffers updated by local data
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningMeanStd:
    def __init__(self):
        self.mean, self.var, self.count = torch.zeros(()), torch.ones(()), 1e-4

    def update(self, x):
        n, mean, var = x.numel(), x.mean(), x.var(unbiased=False)
        delta, total = mean - self.mean, self.count + n
        m2 = self.var * self.count + var * n + delta ** 2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total

    def normalise(self, x):
        return ((x - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-5, 5)


def returns(n=128):
    g = torch.Generator().manual_seed(71)
    obs = torch.randn(n, 10, generator=g)
    ret = 30 + 12 * obs[:, 0] - 7 * obs[:, 1] * obs[:, 2] + 5 * torch.randn(n, generator=g)
    return TensorDataset(obs, ret)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num-envs", type=int, default=16, help="rows per update over all processes")
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    critic = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(critic.parameters(), lr=args.lr)
    stats = RunningMeanStd()
    data = returns()
    for obs, ret in DataLoader(data, batch_size=args.num_envs // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        stats.update(ret)
        loss = (critic(obs).squeeze(1) - stats.normalise(ret)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
