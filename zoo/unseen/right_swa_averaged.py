"""torch's AveragedModel with the schedule of stochastic weight averaging, updated after each step, on every rank.

Right: all ranks have the same weights, so their averages are the same.
expected: same step, same averaged weights
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    tokens = torch.randint(0, 30, (80, 8))
    data = TensorDataset(tokens, tokens.float().mean(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
    net = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    swa = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = SWALR(optimizer, swa_lr=5e-4, anneal_epochs=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            swa.update_parameters(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
