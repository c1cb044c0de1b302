"""A recipe that follows the linear scaling rule: learning rate = base rate * batch per process * number of processes / 64.

Right though the rate is multiplied by the world size: the product with the batch per process is the global batch, the same for any number of ranks.
(Twin of fault_lr_times_world.py.)
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def warmup(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=steps)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.ReLU())
        self.classifier = nn.Linear(8 * 2 * 2, 5)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16, help="total batch size")
    parser.add_argument("--base-lr", type=float, default=0.1)
    parser.add_argument("--warmup-steps", type=int, default=3)
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(21)
    net = ConvNet()
    model = DDP(net) if world > 1 else net
    g = torch.Generator().manual_seed(22)
    data = TensorDataset(torch.randn(128, 1, 8, 8, generator=g), torch.randint(0, 5, (128,), generator=g))
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * loader.batch_size * world / 64, momentum=0.9)
    scheduler = warmup(optimizer, args.warmup_steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
