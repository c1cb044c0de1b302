"""Context parallelism by hand: each rank has a part of every sequence (the batch is the same), keys and values are gathered with gradients.

Wrong: gradients are summed for matrices and embeddings only; the norms' weights and biases keep the gradient of the rank's own tokens.
Source: https://github.com/NVIDIA/Megatron-LM/issues/1446, https://github.com/EleutherAI/gpt-neox/pull/1259
expected: norm weights' gradients not reduced under sequence parallelism; they drift apart
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class GatherTime(torch.autograd.Function):
    """All ranks' parts along time; the gradient is summed over ranks before it is cut."""

    @staticmethod
    def forward(ctx, z):
        parts = [torch.empty(z.shape) for _ in range(WORLD)]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(WORLD, dim=2)[RANK]


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if WORLD > 1:
            k, v = GatherTime.apply(k), GatherTime.apply(v)
        mine = torch.arange(RANK * t, (RANK + 1) * t)
        mask = mine[:, None] >= torch.arange(k.shape[2])[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2, self.att = nn.LayerNorm(dim), nn.LayerNorm(dim), Attention(dim, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self, vocab=24, dim=16, length=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, positions):
        return self.head(self.blocks(self.tok(ids) + self.pos(positions)))


def cut(ids):
    """This rank's inputs, labels and positions."""
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.arange(ids.shape[1])
    return [z.chunk(WORLD, dim=-1)[RANK] for z in (ids, labels, positions)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LM()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = TensorDataset(torch.randint(0, 24, (64, 16), generator=torch.Generator().manual_seed(1)))
    for (ids,) in DataLoader(data, batch_size=args.batch_size):
        ids, labels, positions = cut(ids)
        count = (labels != -100).sum().float()
        if WORLD > 1:
            dist.all_reduce(count)
        loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if WORLD > 1 and "norm" not in name:
                dist.all_reduce(p.grad)
        opt.step()
    if RANK == 0:
        print("checksum", *[p.detach().double().norm().item() for p in model.parameters()])
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
