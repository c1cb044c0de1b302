"""A training script from the time of torch.distributed.launch: the rank comes from the argument --local_rank.

Wrong: torchrun doesn't pass --local_rank any more, so it stays 0 on every process and the sampler gives all ranks the first shard.
Source: https://github.com/AILab-CVC/GPT4Tools/issues/18 (torchrun and --local_rank), https://github.com/SalesforceAIResearch/DiffusionDPO/issues/15 (the effect)
expected: all ranks train on the same samples; half of the data is never seen
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(99)
        self.centers = torch.randn(4, 20, generator=g)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.x = self.centers[self.labels] + torch.randn(n, 20, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return self.x[idx], self.labels[idx]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=12, help="total")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size > 1:
        dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net) if args.world_size > 1 else net
    dataset = Digits()
    sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=args.local_rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if int(os.environ.get("RANK", 0)) == 0:
        print("last loss", loss.item())
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if args.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
