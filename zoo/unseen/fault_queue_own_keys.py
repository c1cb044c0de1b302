"""Momentum contrast (MoCo): a queue of keys serves as negatives; key encoder by EMA. Both are made from the weights DDP has broadcast.

Wrong: each rank enqueues only its own keys (no gather before dequeue-and-enqueue), so ranks have different queues that age more slowly.
Source: compare https://github.com/facebookresearch/vissl/issues/474 (negatives under data parallelism); MoCo's code gathers here
expected: queue (buffer) filled with local keys
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Queue:
    def __init__(self, size, dim):
        self.keys = F.normalize(torch.randn(size, dim), dim=1)
        self.at = 0

    def put(self, keys):
        rows = (self.at + torch.arange(len(keys))) % len(self.keys)
        self.keys[rows] = keys
        self.at = (self.at + len(keys)) % len(self.keys)


def encoder():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--queue", type=int, default=48)
    ap.add_argument("--momentum", type=float, default=0.9)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(17)
    net = encoder()
    slow = copy.deepcopy(net).requires_grad_(False)
    queue = Queue(args.queue, 8)
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    g = torch.Generator().manual_seed(18)
    x = torch.randn(160, 12, generator=g)
    data = TensorDataset(x + 0.1 * torch.randn(160, 12, generator=g), x + 0.1 * torch.randn(160, 12, generator=g))
    for view1, view2 in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        with torch.no_grad():
            for s, p in zip(slow.parameters(), net.parameters()):
                s.lerp_(p, 1 - args.momentum)
            key = F.normalize(slow(view2), dim=1)
        query = F.normalize(model(view1), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.keys.T], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue.put(key)
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
