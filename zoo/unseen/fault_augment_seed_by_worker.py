"""Augmentation with numpy in DataLoader workers; worker_init_fn gives each worker a seed, as the guides recommend.

Wrong: the seed has the worker's id but not the rank in it: worker k of every rank draws the same crops and flips.
Source: https://github.com/huggingface/transformers/issues/37932
expected: augmentation equal on all ranks
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    def __init__(self, n=96):
        rng = np.random.default_rng(1)
        self.img = rng.normal(size=(n, 10, 10)).astype(np.float32)
        self.label = rng.integers(0, 3, n)
        self.img[np.arange(n), 4, 2 + self.label * 2] += 3

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        top, left = np.random.randint(0, 3, 2)
        img = self.img[i, top:top + 8, left:left + 8]
        if np.random.rand() < 0.5:
            img = img[::-1]
        img = img * np.random.uniform(0.7, 1.3)
        return torch.from_numpy(np.ascontiguousarray(img, dtype=np.float32)), int(self.label[i])


def seed_worker(worker_id):
    np.random.seed(1000 + worker_id)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--workers", type=int, default=1)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    data = Augmented()
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=True),
                        num_workers=args.workers, worker_init_fn=seed_worker)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
