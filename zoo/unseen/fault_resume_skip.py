"""A run resumed in the middle of an epoch: samples already seen are skipped by their number, model and optimizer are loaded.

Wrong: the number to skip is counted over all ranks but skipped in each rank's own list of indices, so twice as many samples are left out.
Source: none found; compare https://github.com/vllm-project/speculators/pull/1026 (mid-epoch resume)
expected: after resumption other samples than the uninterrupted run; fewer steps
"""
import argparse
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResumableSampler(DistributedSampler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.skip = 0

    def __iter__(self):
        indices = list(super().__iter__())
        yield from indices[self.skip:]
        self.skip = 0


class Job:
    def __init__(self, args, data, rank, world):
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 1))
        self.model = DDP(self.net) if world > 1 else self.net
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.sampler = ResumableSampler(data, world, rank, shuffle=True, seed=args.seed)
        self.loader = DataLoader(data, batch_size=args.batch_size // world, sampler=self.sampler)
        self.samples_seen = 0
        self.global_batch = args.batch_size

    def run(self, stop_after=None):
        for step, (x, y) in enumerate(self.loader):
            if step == stop_after:
                break
            loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.samples_seen += self.global_batch

    def state(self):
        buffer = io.BytesIO()
        torch.save([self.net.state_dict(), self.opt.state_dict(), self.samples_seen], buffer)
        return buffer.getvalue()

    def load(self, blob):
        net, opt, self.samples_seen = torch.load(io.BytesIO(blob))
        self.net.load_state_dict(net)
        self.opt.load_state_dict(opt)
        self.sampler.skip = self.samples_seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(192, 12, generator=g)
    data = TensorDataset(x, x[:, :3].prod(1, keepdim=True))
    first = Job(args, data, rank, world)
    first.run(stop_after=5)
    second = Job(args, data, rank, world)
    second.load(first.state())
    second.run()
    if rank == 0:
        print("samples", second.samples_seen)
        print("checksum", *[p.detach().double().norm().item() for p in second.net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
