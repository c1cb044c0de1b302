"""A streaming (iterable) data set read by DataLoader workers, DDP: record i belongs to rank i % world.

Right: the stream is cut by ranks first, then by workers; one worker per rank keeps the order of records. (Twin of fault_stream_by_worker_only.py.)
Source: https://github.com/huggingface/datasets/issues/3423
expected: same step
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
    def __init__(self, rank, world, records=144):
        self.rank, self.world, self.records = rank, world, records

    def read(self):
        for i in range(self.records):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, (x[0] * x[1] > 0).long()

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = itertools.islice(self.read(), self.rank, None, self.world)
        return itertools.islice(mine, worker, None, workers)


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
    loader = DataLoader(Stream(rank, world), batch_size=args.batch_size // world, num_workers=args.workers)
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
