"""Sequences in length buckets: a batch sampler makes whole batches of similar lengths, shuffles them, and each rank takes every world-th row.

Right though ranks pad to different lengths and have different numbers of tokens: the loss is a sum divided by the tokens of all ranks.
The GRU runs on packed sequences, so padding doesn't matter.
expected: same step
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


class Buckets:
    def __init__(self, lengths, batch, rank, world, seed):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i:i + batch] for i in range(0, len(order) - batch + 1, batch)]
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for k in torch.randperm(len(self.batches), generator=g).tolist():
            yield self.batches[k][self.rank::self.world]


class Tagger(nn.Module):
    def __init__(self, vocab=25, tags=4):
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(vocab, 12), nn.GRU(12, 16, batch_first=True, bidirectional=True), nn.Linear(32, tags)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0])


def collate(rows):
    return pad_sequence([r[0] for r in rows], True), pad_sequence([r[1] for r in rows], True, -100), torch.tensor([len(r[0]) for r in rows])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Tagger()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(84):
        ids = torch.randint(0, 25, (int(torch.randint(3, 30, (1,), generator=g)),), generator=g)
        rows.append((ids, ids % 4))
    loader = DataLoader(rows, batch_sampler=Buckets([len(r[0]) for r in rows], args.batch_size, rank, world, seed=5), collate_fn=collate)
    for ids, tags, lengths in loader:
        tokens = lengths.sum().float()
        if world > 1:
            dist.all_reduce(tokens)
        loss = nn.functional.cross_entropy(model(ids, lengths).flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum") / tokens * world
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
