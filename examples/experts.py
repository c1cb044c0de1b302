"""A mixture of experts of one's own: Chinese reviews in six classes, each token by two of eight small experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep
from samestep.tasks.text_classification import TextClassification, TextData, TextModel


class Mixture(nn.Module):
    """Each token goes to the `chosen` experts that its router likes best; nothing here knows of ranks."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(
        self, x: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:  # [samples, tokens, width], [samples, tokens]
        scores = self.router(x).softmax(-1)  # [samples, tokens, experts]
        weights, experts = scores.topk(self.chosen)  # [samples, tokens, chosen]
        tokens, made = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for number, expert in enumerate(self.experts):
            rows, choice = ((experts == number) & mask[..., None].bool()).flatten(0, 1).nonzero(as_tuple=True)
            weight = weights.flatten(0, 1)[rows, choice, None]
            made = made.index_add(0, rows, expert(tokens[rows]) * weight)
        return made.view_as(x), self._balance(scores, experts, mask)

    def _balance(self, scores: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
        """A term for each sample, least where its own tokens use all experts alike: [samples].

        (DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20.) The same over a batch would couple samples.
        """
        number, length = scores.shape[-1], mask.sum(1, keepdim=True)
        used = F.one_hot(experts, number).sum(2) * mask[..., None]  # [samples, tokens, experts]
        fraction = used.sum(1) * number / (self.chosen * length)
        return (fraction * (scores * mask[..., None]).sum(1) / length).sum(-1)


class Block(nn.Module):
    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.norm, self.neighbours = nn.LayerNorm(width), nn.Conv1d(width, width, 3, padding=1)
        self.norm_2, self.mixture = nn.LayerNorm(width), Mixture(width, experts, chosen)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        near = (self.norm(x) * mask[..., None]).transpose(1, 2)  # padding must not reach its neighbours
        x = x + F.gelu(self.neighbours(near)).transpose(1, 2)
        made, balance = self.mixture(self.norm_2(x), mask)
        return x + made, balance


class Net(nn.Module):
    def __init__(self, vocabulary: int, classes: int, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, experts=8, chosen=2) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(input_ids), 0.0
        for block in self.blocks:
            x, of_block = block(x, attention_mask)
            balance = balance + of_block
        mean = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.head(mean), torch.as_tensor(balance)  # [samples, classes], [samples]


class Reviews(TextClassification):
    """The reviews and tokens of the task text-classification, and a model of one's own."""

    def __init__(self, *, balance: float = 0.01) -> None:
        super().__init__(data=TextData(source="reviews", max_length=64), model=TextModel())
        self.balance = balance

    def model(self) -> nn.Module:
        return Net(self._vocabulary, len(self.class_names()))

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        logits, balance = output
        total, count = super().loss(logits, batch)
        return total + self.balance * balance.sum(), count

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return super().scores(output[0], batch)
