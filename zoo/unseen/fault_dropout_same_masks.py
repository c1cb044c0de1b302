"""Fine-tuning of a small BERT classifier with DDP, dropout 0.1 to 0.3; a helper seeds everything, model weights included.

Wrong: the same seed stays in use on all ranks in the loop, so the k-th sample of every rank gets the same dropout masks.
Source: https://github.com/ByteDance-Seed/VeOmni/issues/143
expected: random masks equal on all ranks
"""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import BertConfig, BertForSequenceClassification


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Sentences(Dataset):
    def __init__(self, n=64, length=10, vocab=50):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, vocab, (n, length), generator=g)
        self.labels = (self.ids.sum(1) % 2).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    set_seed(args.seed)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                        hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.1, max_position_embeddings=16)
    net = BertForSequenceClassification(config)
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Sentences()
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)
    model.train()
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print("checksum", *[p.detach().double().norm().item() for p in net.parameters()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
