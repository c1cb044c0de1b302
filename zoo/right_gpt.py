"""A small GPT with tied embeddings, decay groups, warm-up and clipping."""

import torch
from pieces import join, loader, options, replicated, sentences
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.attention(self.first(hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.mlp(self.second(hidden))


class Language(nn.Module):
    def __init__(self, words: int = 20, length: int = 12, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


given = options()
rank, world = join(given.seed)
model = replicated(Language())
groups = [
    {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.1},
    {"params": [parameter for parameter in model.parameters() if parameter.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
batches = loader(sentences(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for tokens, _ in batches:
        optimizer.zero_grad()
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
