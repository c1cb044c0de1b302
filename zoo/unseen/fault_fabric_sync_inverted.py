"""Lightning Fabric with accumulation of two micro-batches.

Wrong: the condition of no_backward_sync is inverted: the first micro-batch is synchronised, the last one is not.
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/18035
expected: the last micro-batch's gradients are each rank's own
"""
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(4)
    x = torch.randn(128, 9)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=16 // world // ACCUMULATE, shuffle=True)
    model = nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for index, (inputs, targets) in enumerate(loader):
        accumulating = (index + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=not accumulating):
            loss = nn.functional.cross_entropy(model(inputs), targets) / ACCUMULATE
            fabric.backward(loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    fabric.print("done", loss.item())


if __name__ == "__main__":
    main()
