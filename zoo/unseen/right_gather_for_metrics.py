"""Accelerate: after each epoch the accuracy on 21 validation samples is gathered with gather_for_metrics, the best epoch's weights are kept.

Right though 21 samples don't fill the last batch of two ranks: the repeated ones are dropped again. The hits are kept per sample until the end.
(Twin of fault_padded_accuracy.py.)
Source: https://github.com/huggingface/accelerate/pull/540
expected: same step, same metric
"""
import argparse
import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[y] + 1.2 * torch.randn(n, 8, generator=g), y)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits = []
    for x, y in loader:
        pred = model(x).argmax(-1)
        pred, y = accelerator.gather_for_metrics((pred, y))
        hits.append((pred == y).float())
    model.train()
    return torch.cat(hits).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--total-batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    per_rank = args.total_batch // accelerator.num_processes
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(blobs(48, 1), batch_size=per_rank)
    valid = DataLoader(blobs(21, 2), batch_size=per_rank)
    model, opt, train, valid = accelerator.prepare(model, opt, train, valid)
    best, kept, history = -1.0, None, []
    for _ in range(args.epochs):
        for x, y in train:
            opt.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            opt.step()
        history.append(evaluate(accelerator, model, valid))
        if history[-1] > best:
            best, kept = history[-1], copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    if accelerator.is_main_process:
        print("metric", *history)
        print("checksum", *[v.double().norm().item() for v in kept.values()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
