"""Nets whose forward draws random numbers: in ways that every layout keeps, and in ways that the check refuses."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from odd_nets import Net
from torch import Tensor, nn

import samestep


class DropPath(Net):
    """Stochastic depth: some samples skip a branch (Huang et al. 2016)."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * (torch.rand(len(hidden), 1) < 0.5) if self.training else hidden


class NewEmptyDropPath(Net):
    """Stochastic depth as timm and torchvision write it."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.new_empty(len(hidden), 1).bernoulli_(0.5) if self.training else hidden


class LayerDrop(Net):
    """One number for the whole step decides whether a layer is taken (Fan et al. 2019)."""

    def between(self, hidden: Tensor) -> Tensor:
        return torch.where(torch.rand([]) < 0.5, hidden * 2, hidden) if self.training else hidden


class Noisy(Net):
    """Noise of several kinds."""

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        hidden = hidden + torch.randn_like(hidden) + torch.normal(torch.zeros_like(hidden), 0.1)
        steps = torch.randint(0, 10, (len(hidden),))
        kinds = torch.multinomial(hidden.detach().softmax(-1), 2)
        gumbel = F.gumbel_softmax(hidden, hard=True)
        return hidden * steps[:, None] + hidden.gather(1, kinds).sum(1, keepdim=True) + gumbel


class SecondSamples(Net):
    """Draws for two experts a sample, with the samples second, as libraries of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        samestep.draws_along(self, 1)

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        kept = hidden.new_empty(2, *hidden.shape).uniform_() < 0.5
        return hidden * kept[0] + F.dropout(hidden.expand(2, -1, -1), 0.3)[1]


class TokensFirst(Net):
    """An encoder of PyTorch with dropout over [tokens, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2) for _ in range(2)]
        self.encoder = samestep.draws_along(nn.Sequential(*layers), 1)

    def between(self, hidden: Tensor) -> Tensor:
        return self.encoder(torch.stack([hidden, hidden * 2, -hidden])).sum(0)


class LateDropout(Net):
    """Drops nothing in the first step: until a parameter that begins with 0 has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def between(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden + self.shift, 0.5, self.training and bool(self.shift != 0))


class NumpyDraw(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * float(np.random.rand())


class PythonDraw(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * random.random()


class KernelDraw(Net):
    """Draws inside a kernel of PyTorch, where no function is seen."""

    def between(self, hidden: Tensor) -> Tensor:
        return F.rrelu(hidden, training=True)


class Permuted(Net):
    """Mixes each sample with another, as mixup does."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + hidden[torch.randperm(len(hidden))]


class AlwaysNoisy(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


def look_at_some(elements: Sequence[Any] | Tensor) -> None:
    """Draws as a checker of types does, which looks at an element of a list at random."""
    assert elements[random.getrandbits(32) % len(elements)] is not None
    assert elements[np.random.randint(len(elements))] is not None


class Glancing(Net):
    """A net whose arguments a checker of types looks at, built and called: no number of it depends on that."""

    def __init__(self) -> None:
        super().__init__()
        look_at_some([4, 16, 3])

    def between(self, hidden: Tensor) -> Tensor:
        look_at_some(hidden)
        return hidden


class SeldomSkipping(Net):
    """Skips a layer once in a thousand forwards, by Python's generator."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden if random.random() < 0.001 else hidden * 2


class SeldomWithoutSlope(Net):
    """Once in a thousand forwards other gradients, and the same output."""

    def between(self, hidden: Tensor) -> Tensor:
        look_at_some(hidden)
        return hidden * 2 - hidden.detach() if np.random.rand() > 0.999 else hidden


class AnyActivation(Net):
    """A function as a plain attribute, and nothing registered, decides otherwise in every process."""

    def __init__(self) -> None:
        super().__init__()
        look_at_some([4, 16, 3])
        self.functions = [torch.tanh if np.random.rand() < 0.999 else torch.relu]

    def between(self, hidden: Tensor) -> Tensor:
        return self.functions[0](hidden)
