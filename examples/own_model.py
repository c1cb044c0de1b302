"""A model of one's own under five layouts: it knows nothing of ranks, and every layout takes the same step.

python examples/own_model.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Model(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> [batch, tokens, vocabulary]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Echo(samestep.Task):
    """Say again what was said four tokens before."""

    def model(self) -> nn.Module:
        return Model()

    def train_set(self) -> samestep.Samples:
        return torch.randint(32, (200, 16), generator=torch.Generator().manual_seed(0))

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        ids = torch.stack(list(samples))  # [batch, tokens]
        return samestep.Batch(ids[:, 4:], ids[:, :-4])

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        logits = output.flatten(0, 1)  # [batch * tokens, vocabulary]
        return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum"), batch.targets.numel()


if __name__ == "__main__":
    recipe = samestep.Recipe(task=Echo(), batch=16, steps=20, optimizer=samestep.AdamW(lr=1e-3))
    for layout in ("dp2", "fsdp2", "tp2", "pp2", "cp2"):
        proof = samestep.verify(recipe, layout=layout)
        print(f"{layout}: same step: {proof.same_step}, {dict(proof.max_relative_difference)}")
