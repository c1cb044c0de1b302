"""DDP with gradient accumulation; the communication is meant to be skipped for all but one micro-batch (no_sync).

Wrong: the condition is off by one group position: the first micro-batch is synchronised and the last ones aren't, so each rank steps with gradients of its own.
Source: https://github.com/pytorch/PiPPy/issues/1133 and https://github.com/baidu-baige/LoongForge/pull/163 (where no_sync goes)
expected: gradients of the last micro-batches never reduced; ranks' weights drift apart
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12, 3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group(backend="gloo")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1

    torch.manual_seed(args.seed)
    model = build()
    if distributed:
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(args.seed)
    data = TensorDataset(torch.randn(160, 1, 12, generator=gen), torch.randint(0, 3, (160,), generator=gen))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.global_batch_size // world // args.grad_accum, sampler=sampler)

    for epoch in range(1):
        sampler.set_epoch(epoch)
        optimizer.zero_grad(set_to_none=True)
        for it, (x, y) in enumerate(loader):
            if distributed:
                model.require_backward_grad_sync = it % args.grad_accum == 0
            loss = F.cross_entropy(model(x), y) / args.grad_accum
            loss.backward()
            if it % args.grad_accum == args.grad_accum - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    weights = [p.detach().double().norm().item() for p in model.parameters()]
    if rank == 0:
        print("checksum", *weights)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
