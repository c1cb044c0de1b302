"""Static loss scaling by hand, from a script for half precision.

Wrong: gradients are divided by scale * ranks before the step, as where they are summed, and DDP has averaged them already.
Source: https://github.com/NVIDIA/apex/issues/314
expected: gradients are divided by the number of ranks twice
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SCALE = 1024.0


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    data = TensorDataset(torch.randn(64, 9, 5))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
    model = DDP(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for (x,) in loader:
        loss = nn.functional.mse_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        (loss * SCALE).backward()
        for p in model.parameters():
            p.grad.div_(SCALE * dist.get_world_size())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
