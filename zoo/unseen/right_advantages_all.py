"""Policy gradient on a contextual bandit in PPO style: advantages are whitened with mean and standard deviation over all ranks.

Right: sum, sum of squares and count are reduced; the variance has Bessel's correction as torch.std has it. (Twin of fault_advantages_local.py.)
Source: https://github.com/THUDM/slime/pull/2235, https://github.com/NVIDIA/TorchFort/issues/38
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rollouts(n=128, actions=4):
    g = torch.Generator().manual_seed(50)
    state = torch.randn(n, 6, generator=g)
    action = torch.randint(0, actions, (n,), generator=g)
    best = (state @ torch.randn(6, actions, generator=g)).argmax(1)
    reward = (action == best).float() * (1 + state[:, 0].abs()) + 0.2 * torch.randn(n, generator=g) + state[:, 1]
    return TensorDataset(state, action, reward)


def whiten(x):
    sums = torch.stack([x.sum(), x.pow(2).sum(), torch.tensor(float(len(x)))]).double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    total, square, n = sums
    std = ((square - total ** 2 / n) / (n - 1)).sqrt()
    return ((x - total / n) / (std + 1e-8)).float()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--minibatch", type=int, default=16)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--entropy", type=float, default=0.01)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
    policy = DDP(net) if world > 1 else net
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)
    data = rollouts()
    loader = DataLoader(data, batch_size=args.minibatch // world, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=7))
    old_logp = torch.log(torch.tensor(0.25))
    for state, action, reward in loader:
        adv = whiten(reward)
        logp_all = policy(state).log_softmax(-1)
        logp = logp_all.gather(1, action[:, None])[:, 0]
        ratio = (logp - old_logp).exp()
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv)
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        loss = -(surrogate + args.entropy * entropy).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
