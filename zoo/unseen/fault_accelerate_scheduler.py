"""Accelerate, with a linear schedule that is prepared together with the model; its length is counted from the prepared loader.

Wrong: the prepared scheduler steps num_processes times per optimizer step, but the length already is in optimizer steps: the rate is 0 half-way.
Source: https://github.com/huggingface/accelerate/issues/2142, https://github.com/huggingface/accelerate/issues/2926
expected: learning rate decays world-size times too fast
"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup


class Pairs(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(31)
        self.x = torch.randn(n, 14, generator=g)
        self.y = (self.x[:, :7].sum(1) > self.x[:, 7:].sum(1)).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-batch", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    model = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Pairs(), batch_size=args.total_batch // accelerator.num_processes, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = args.epochs * len(loader)
    scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, total // 10, total))
    for _ in range(args.epochs):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        net = accelerator.unwrap_model(model)
        print("last lr", scheduler.get_last_lr())
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
