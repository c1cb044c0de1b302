"""An average of the weights beside a training that accumulates: 4 micro-batches in one process, 2 on each of two ranks.

Wrong: the average is updated after every micro-batch, so its decay depends on the number of processes.
Source: https://github.com/lucidrains/ema-pytorch/issues/14
expected: the averaged weights differ
"""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO, GLOBAL = 6, 24


class Average:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


class Flowers(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(77)
        self.x = torch.randn(144, 7, generator=g)
        self.y = (self.x @ torch.randn(7, 4, generator=g)).argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 4))
    average = Average(net, 0.9)
    model = DDP(net)
    sampler = torch.utils.data.DistributedSampler(Flowers(), shuffle=False)
    loader = torch.utils.data.DataLoader(Flowers(), batch_size=MICRO, sampler=sampler)
    every = GLOBAL // MICRO // world
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"]) / every
            loss.backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            average.update(net)
    if dist.get_rank() == 0:
        print("average", sum(p.double().norm().item() for p in average.model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
