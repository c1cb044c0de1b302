"""Two tasks whose losses are weighted by their own moving averages, so that both count alike (as in dynamic weight averaging).

Wrong: the moving averages are those of the rank's own losses, so ranks optimise differently weighted sums.
Source: none found; thresholds and weights by local losses as in https://github.com/ecmwf/WeatherGenerator/issues/2724
expected: loss weights depend on the rank's own losses
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, x):
        h = self.body(x)
        return self.a(h).squeeze(1), self.b(h)


class Balance:
    def __init__(self, tasks, decay=0.5):
        self.average, self.decay = [None] * tasks, decay

    def __call__(self, losses):
        for k, loss in enumerate(losses):
            value = loss.item()
            self.average[k] = value if self.average[k] is None else self.decay * self.average[k] + (1 - self.decay) * value
        return sum(loss / average for loss, average in zip(losses, self.average))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = TwoHeads()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 8, generator=g)
    data = TensorDataset(x, 5 * x[:, 0] ** 3, torch.randint(0, 3, (128,), generator=g))
    balance = Balance(2)
    for bx, ya, yb in DataLoader(data, batch_size=args.batch_size // world, sampler=DistributedSampler(data, world, rank, shuffle=False)):
        a, b = model(bx)
        loss = balance([nn.functional.mse_loss(a, ya), nn.functional.cross_entropy(b, yb)])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
