"""A mixture-of-experts layer with top-1 routing and a global-batch load-balancing loss, trained with DDP.

Right though only the fractions of tokens are reduced over ranks and the router's mean probabilities aren't: the loss is linear in the
latter, so DDP's mean of the gradients does the rest. (Twin of fault_moe_balance_local.py.)
Source: https://github.com/NVIDIA/Megatron-LM/issues/1498
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_balance(probs, chosen, experts):
    fraction = nn.functional.one_hot(chosen, experts).float().mean(0)
    if dist.is_initialized():
        dist.all_reduce(fraction)
        fraction /= dist.get_world_size()
    return experts * (fraction * probs.mean(0)).sum()


class MoE(nn.Module):
    def __init__(self, dim=12, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim ** 0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) / (2 * dim) ** 0.5)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.max(-1)
        all_out = torch.einsum("neh,ehd->ned", torch.relu(torch.einsum("nd,edh->neh", x, self.w1)), self.w2)
        out = all_out[torch.arange(len(x)), chosen] * weight[:, None]
        return x + out, load_balance(probs, chosen, len(self.w1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(10, 12), MoE(), nn.Linear(12, 3)

    def forward(self, x):
        h, aux = self.moe(self.inp(x))
        return self.out(h), aux


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--aux-coef", type=float, default=0.5)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    net = Net()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(6)
    data = TensorDataset(torch.randn(128, 10, generator=g), torch.randint(0, 3, (128,), generator=g))
    for x, y in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        logits, aux = model(x)
        loss = nn.functional.cross_entropy(logits, y) + args.aux_coef * aux
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
