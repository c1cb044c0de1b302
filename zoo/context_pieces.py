"""A language model of which each rank has a part of the sequence: every rank sees all keys and values."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 12


class Gathered(torch.autograd.Function):
    """The parts of all ranks, joined along the sequence; what comes back is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Attention(nn.Module):
    """Causal attention of one head, whose keys and values come from all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor, begun: int) -> Tensor:
        keys = Gathered.apply(self.key(hidden))  # batch, all tokens, width
        values = Gathered.apply(self.value(hidden))
        scores = self.query(hidden) @ keys.mT / keys.shape[-1] ** 0.5
        places = torch.arange(keys.shape[1])
        later = places > begun + torch.arange(hidden.shape[1])[:, None]
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ values


class Writer(nn.Module):
    """Predicts the next token of each of a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.places = nn.Embedding(LENGTH, 16)
        self.attention = Attention(16)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor, begun: int, place: int) -> Tensor:
        """`begun`: which token of the sequence is this rank's first; `place`: which place it is given."""
        hidden = self.tokens(tokens) + self.places(place + torch.arange(tokens.shape[1]))
        return self.head(hidden + self.attention(hidden, begun))


def texts(batch: int) -> DataLoader:
    """Batches of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 20, (3 * batch, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=batch)


def summed_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
