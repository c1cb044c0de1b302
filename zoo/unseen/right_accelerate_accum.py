"""Accelerate with a fixed micro-batch; the number of accumulation steps follows from the global batch and the number of processes.

Right: the loss isn't divided in the script, accelerator.backward does it. 4 micro-batches alone, 2 on two ranks. (Twin of
fault_accelerate_accum_twice.py.)
expected: same step
"""
import argparse

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sums(Dataset):
    def __init__(self, n=128):
        self.x = torch.randn(n, 9, generator=torch.Generator().manual_seed(12))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i].abs().sum()[None]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    accum = args.global_batch // args.micro_batch // PartialState(cpu=True).num_processes
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum)
    set_seed(3)
    model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(Sums(), batch_size=args.micro_batch)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    if accelerator.is_main_process:
        print("checksum", *[p.detach().double().norm().item() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
