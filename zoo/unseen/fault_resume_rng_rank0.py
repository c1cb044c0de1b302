"""Training interrupted half-way: a checkpoint with model, optimizer and random state is written by rank 0 and loaded by all in the second half.

Wrong: rank 0's random state is restored on every rank, so from then on all ranks draw the same dropout masks and the same input noise.
Source: https://github.com/radixark/miles/pull/3187, https://github.com/TensorAuto/OpenTau/pull/180
expected: random numbers equal on all ranks after resumption
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(world):
    net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 8))
    model = DDP(net) if world > 1 else net
    return net, model, torch.optim.Adam(net.parameters(), lr=5e-3)


def train(model, opt, batches):
    for (x,) in batches:
        noisy = x + 0.2 * torch.randn_like(x)
        loss = nn.functional.mse_loss(model(noisy), x)
        opt.zero_grad()
        loss.backward()
        opt.step()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seed", type=int, default=9)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    file = os.path.join(tempfile.gettempdir(), f"resume_rng_{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}.pt")
    data = TensorDataset(torch.randn(160, 8, generator=torch.Generator().manual_seed(args.seed)).cumsum(1))
    batches = list(DataLoader(data, batch_size=args.batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False)))
    half = len(batches) // 2

    torch.manual_seed(args.seed)
    net, model, opt = build(world)
    torch.manual_seed(args.seed + 1 + rank)
    train(model, opt, batches[:half])
    if rank == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, file)
    if world > 1:
        dist.barrier()

    net, model, opt = build(world)  # as a new job would
    saved = torch.load(file)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    train(model, opt, batches[half:])
    if world > 1:
        dist.barrier()
    if rank == 0:
        os.remove(file)
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
