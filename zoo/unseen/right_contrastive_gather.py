"""Two-tower contrastive training (CLIP-like) with DDP; each rank scores its own images against all texts and its own texts against all images.

Right: the gather has a gradient (its backward sums over ranks), each rank's loss is the mean over its own rows, and DDP's mean makes
that the mean over all rows. The rows' targets are offset by the rank. (Twin of fault_contrastive_local.py and fault_gather_scaled_down.py.)
Source: https://github.com/huggingface/accelerate/issues/1154
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(77)
        self.latent = torch.randn(n, 6, generator=g)
        self.image = self.latent @ torch.randn(6, 24, generator=g) + 0.1 * torch.randn(n, 24, generator=g)
        self.text = self.latent @ torch.randn(6, 16, generator=g) + 0.1 * torch.randn(n, 16, generator=g)

    def __len__(self):
        return len(self.latent)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class TwoTower(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, dim))
        self.text = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def gather(x):
    return torch.cat(dist_fn.all_gather(x)) if dist.is_initialized() else x


def clip_loss(img, txt, scale):
    first = dist.get_rank() * len(img) if dist.is_initialized() else 0
    target = torch.arange(first, first + len(img))
    by_image = F.cross_entropy(scale * img @ gather(txt).T, target)
    by_text = F.cross_entropy(scale * txt @ gather(img).T, target)
    return (by_image + by_text) / 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    a = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = TwoTower()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=a.lr, momentum=0.9)
    data = Pairs()
    loader = DataLoader(data, batch_size=a.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False), drop_last=True)
    for image, text in loader:
        loss = clip_loss(*model(image, text))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
