"""Accelerate with a fixed micro-batch; the number of accumulation steps follows from the global batch and the number of processes.

Wrong: accelerator.accumulate/backward already divide the loss by the number of accumulation steps, and the script divides once more. As that
number depends on the number of processes (4 alone, 2 on two ranks), so does the size of the gradient.
Source: none found for a single case; compare https://github.com/huggingface/transformers/pull/34191
expected: gradients divided twice by the accumulation steps
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
            loss = nn.functional.mse_loss(model(x), y) / accum
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    if accelerator.is_main_process:
        print("checksum", *[p.detach().double().norm().item() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
