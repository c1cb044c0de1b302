"""Fine-tuning with gradient accumulation on answers of different lengths: losses are sums, gradients are divided once, before the step.

Right: the count of labelled tokens is summed over micro-batches and ranks; DDP's mean is undone by the world size. It only looks as if
the loss weren't normalised: the division happens on p.grad. (Twin of fault_accum_token_means.py.)
Source: https://github.com/meta-pytorch/torchtune/pull/1917
expected: same step
"""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Answers(Dataset):
    def __init__(self, n, vocab):
        rng = torch.Generator().manual_seed(11)
        self.rows = []
        for _ in range(n):
            ids = torch.randint(3, vocab, (int(torch.randint(6, 20, (1,), generator=rng)),), generator=rng)
            labels = ids.clone()
            labels[: int(torch.randint(1, len(ids) - 1, (1,), generator=rng))] = -100
            self.rows.append((ids, labels))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([r[1] for r in rows], batch_first=True, padding_value=-100)
    return ids, labels


class TinyLM(nn.Module):
    def __init__(self, vocab, dim=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.tok(ids))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = TinyLM(40)
    model = DistributedDataParallel(net) if world > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    data = Answers(128, 40)
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, batch_size=args.global_batch // world // args.accum, sampler=sampler, collate_fn=pad)
    tokens = torch.zeros(())
    for i, (ids, labels) in enumerate(loader):
        last = (i + 1) % args.accum == 0
        with contextlib.nullcontext() if last or world == 1 else model.no_sync():
            logits = model(ids)[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
            loss.backward()
        tokens += (labels[:, 1:] != -100).sum()
        if last:
            if world > 1:
                dist.all_reduce(tokens)
            for p in net.parameters():
                p.grad.mul_(world / tokens)
            opt.step()
            opt.zero_grad()
            tokens.zero_()
            if rank == 0:
                print(f"step {i // args.accum} loss {loss.item():.4f}")
    if rank == 0:
        print("checksum", *[f"{p.detach().double().norm():.9f}" for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
