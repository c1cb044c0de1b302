"""OneCycleLR whose total_steps come from the number of samples and a rank's batch.

Wrong: with several ranks there are fewer steps: the rate never comes down.
Source: https://github.com/huggingface/transformers/issues/12530
expected: the schedule is too long for the training
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    epochs, batch = 2, 8
    torch.manual_seed(31)
    x = torch.randn(80, 5)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * (len(data) // batch))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
