"""A streaming (iterable) data set read by DataLoader workers, DDP.

Wrong: the stream is split over the workers of a loader but not over ranks: every rank reads everything, all ranks get the same batches.
Source: https://github.com/huggingface/datasets/issues/5360, https://github.com/huggingface/datasets/issues/3423
expected: all ranks train on the same samples
"""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, records=144):
        self.records = records

    def read(self):
        for i in range(self.records):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, (x[0] * x[1] > 0).long()

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return self.read()
        return itertools.islice(self.read(), info.id, None, info.num_workers)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--max-steps", type=int, default=10)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Stream(), batch_size=args.batch_size // world, num_workers=args.workers)
    for x, y in itertools.islice(loader, args.max_steps):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
