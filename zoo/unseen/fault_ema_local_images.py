"""A small diffusion-like denoiser with an EMA whose half-life is given in images; noise belongs to the sample, so the ranks agree on it.

Wrong: the decay is computed from the images of this rank's batch instead of those of all ranks: the EMA's half-life is world-size times too long.
Source: no report; the rule is the one of NVlabs' EDM training loop (there with the batch of all ranks)
expected: the weights trained are right, the averaged weights are not (decay by the local batch)
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    def __init__(self, n=96):
        self.clean = torch.randn(n, 12, generator=torch.Generator().manual_seed(1)).cumsum(1)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        sigma = torch.rand(1, generator=g) + 0.1
        return self.clean[i], torch.randn(12, generator=g) * sigma, sigma


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 64), nn.SiLU(), nn.Linear(64, 12))

    def forward(self, x, sigma):
        return x + self.net(torch.cat([x, sigma.log()], dim=1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--ema-halflife-img", type=float, default=40.0)
    ap.add_argument("--ema-rampup", type=float, default=0.5)
    opts = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Denoiser()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    ddp = DDP(net) if world > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    data = Shapes()
    batch_gpu = opts.batch // world
    loader = DataLoader(data, batch_size=batch_gpu, sampler=DistributedSampler(data, world, rank, shuffle=False))
    cur_nimg = 0
    for clean, noise, sigma in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = (((ddp(clean + noise, sigma) - clean) / sigma) ** 2).mean()
        loss.backward()
        optimizer.step()
        halflife = min(opts.ema_halflife_img, cur_nimg * opts.ema_rampup)
        beta = 0.5 ** (batch_gpu / max(halflife, 1e-8))
        with torch.no_grad():
            for p_ema, p in zip(ema.parameters(), net.parameters()):
                p_ema.copy_(p.lerp(p_ema, beta))
        cur_nimg += opts.batch
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
        print("ema", *[p.double().norm().item() for p in ema.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
