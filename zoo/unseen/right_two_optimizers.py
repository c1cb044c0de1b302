"""A small GAN on the line: discriminator and generator are stepped alternately by two optimizers, each network has its own DDP.

Right though the generator's backward also fills (and DDP reduces) the discriminator's gradients: these are cleared before the discriminator's step.
Latent vectors belong to the data set's rows, so all numbers of ranks use the same.
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 24), nn.LeakyReLU(0.2), nn.Linear(24, o))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--d-steps", type=int, default=2, help="discriminator steps per generator step")
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    nets = [mlp(4, 2), mlp(2, 1)]
    gen, disc = [DDP(n, broadcast_buffers=False) if world > 1 else n for n in nets]
    opt_g = torch.optim.Adam(nets[0].parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(nets[1].parameters(), lr=4e-3, betas=(0.5, 0.9))
    g = torch.Generator().manual_seed(1)
    angle = 6.28 * torch.rand(160, generator=g)
    data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), torch.randn(160, 4, generator=g))
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for it, (real, z) in enumerate(loader):
        if (it + 1) % (args.d_steps + 1):
            opt_d.zero_grad()
            with torch.no_grad():
                fake = gen(z)
            score = disc(torch.cat([real, fake]))
            F.binary_cross_entropy_with_logits(score, torch.cat([torch.ones(len(z), 1), torch.zeros(len(z), 1)])).backward()
            opt_d.step()
        else:
            opt_g.zero_grad()
            F.softplus(-disc(gen(z))).mean().backward()
            opt_g.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for n in nets for p in n.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
