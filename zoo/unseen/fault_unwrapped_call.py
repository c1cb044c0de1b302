"""A variational autoencoder with a method for its loss; the method isn't forward(), so the script calls it on the module inside DDP.

Wrong: model.module.elbo(x) goes past DDP's forward, backward isn't prepared and no gradient is reduced.
Source: https://github.com/kohya-ss/sd-scripts/issues/924 (unwrapped module), https://github.com/rosinality/swapping-autoencoder-pytorch/issues/22
expected: gradients never reduced, each rank trains alone
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Curves(Dataset):
    def __init__(self, n=120, points=16):
        g = torch.Generator().manual_seed(40)
        t = torch.linspace(0, 3, points)
        self.y = torch.rand(n, 1, generator=g) * torch.sin(t * (1 + torch.rand(n, 1, generator=g)))
        self.eps = torch.randn(n, 3, generator=g)  # fixed reparametrisation noise per curve

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.y[i], self.eps[i]


class VAE(nn.Module):
    def __init__(self, points=16, hidden=32, latent=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(points, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, points))

    def forward(self, y):
        return self.dec(self.enc(y).chunk(2, -1)[0])

    def elbo(self, y, eps, beta=0.05):
        mu, log_var = self.enc(y).chunk(2, -1)
        rec = self.dec(mu + eps * (0.5 * log_var).exp())
        kl = 0.5 * (mu.pow(2) + log_var.exp() - log_var - 1).sum(-1)
        return ((rec - y).pow(2).sum(-1) + beta * kl).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=12)
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    vae = VAE()
    model = DistributedDataParallel(vae) if world > 1 else vae
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = Curves()
    loader = DataLoader(data, batch_size=args.batch // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    inner = model.module if hasattr(model, "module") else model
    for y, eps in loader:
        loss = inner.elbo(y, eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("elbo", loss.item())
        print("checksum", *[p.detach().double().norm().item() for p in vae.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
