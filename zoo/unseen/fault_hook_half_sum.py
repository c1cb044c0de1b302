"""A communication hook that sends gradients as half-precision numbers, written after the documentation's example.

Wrong: the sum over ranks is never divided by their number.
Source: https://github.com/pytorch/pytorch/issues/61481
expected: gradients are summed instead of averaged
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def half_hook(state, bucket):
    sent = bucket.buffer().to(torch.float16)
    future = dist.all_reduce(sent, group=state, async_op=True).get_future()

    def back(fut):
        bucket.buffer().copy_(fut.value()[0])
        return bucket.buffer()

    return future.then(back)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.out = nn.Linear(6 * 12, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 12), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(data, shuffle=True, seed=11)
    loader = DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=sampler)
    model = DDP(Net())
    if dist.get_world_size() > 1:
        model.register_comm_hook(None, half_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
