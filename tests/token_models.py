"""Tiny models whose layers move tokens about by code of their own, so that only parts of them split tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

WORDS, WIDTH, TOKENS = 23, 8, 8


class Feed(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Attending(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), Feed(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        hidden = hidden + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return hidden + self.feed(hidden)


class Stage(nn.Module):
    """Layers, and after them half as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.merge = nn.ModuleList(Attending() for _ in range(2)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.merge(hidden.unflatten(1, (-1, 2)).flatten(2))


class Rolled(nn.Module):
    """Tokens that move by one place in the layer's own forward, and a part of it that takes each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), Feed()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.feed(self.norm(hidden.roll(1, 1)))


class Excited(nn.Module):
    """A branch that begins as zero, in which each token gets the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.feed, self.scale = Feed(), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        fed = self.feed(hidden)
        return hidden + fed + self.scale * fed.mean(1, keepdim=True)


class Stacked(nn.Module):
    """Words, layers, and a class for each token that is left."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class TokensFirst(Stacked):
    """Hidden states of [tokens, samples, features], and what a feed-forward layer takes."""

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden.cumsum(0))
        return self.head(hidden.transpose(0, 1))


class Conditioned(nn.Module):
    """Layers that are given something of the whole text: a factor of each token, and keys beside its own ones."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attending()

        def forward(self, hidden: Tensor, text: Tensor) -> Tensor:  # [samples, tokens, width], [samples, width]
            hidden = self.inner(hidden) * (1 + text[:, None])
            return hidden + self.inner.feed(self.inner.norm(text))[:, None]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(2)), nn.Linear(WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        text = self.text(hidden.mean(1))
        for layer in self.layers:
            hidden = layer(hidden, text)
        return self.head(hidden)


class Summing(nn.Module):
    """Layers that also give a loss of their own, which is added to the output."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attending()

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(hidden), self.inner.feed.up.weight.square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        hidden, total = self.embed(words), torch.zeros(())
        for layer in self.layers:
            hidden, own = layer(hidden)
            total = total + own
        return self.head(hidden) * (1 + total)


class Positions(nn.Module):
    """Attention whose key projection is also applied to positions that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        where = self.key(positions).unflatten(-1, (-1, 4)).transpose(0, 1)[None]  # [1, heads, tokens, 4]
        scores = query @ (key + where[:, :, : key.shape[2]]).transpose(-1, -2)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Located(nn.Module):
    """Layers with such attentions, which are given the positions."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.feed = nn.LayerNorm(WIDTH), Positions(), Feed()

        def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
            hidden = hidden + self.attention(self.norm(hidden), positions)
            return hidden + self.feed(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(2)), nn.Linear(WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden, positions = self.embed(words), self.positions[: words.shape[1]] * 1.0
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return self.head(hidden)


class Narrow(nn.Module):
    """Features of which four are needed, in a layer with seven: of two ranks one has three."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        return hidden + self.down(F.gelu(up) + up.unfold(-1, 4, 4).mean((-2, -1)).unsqueeze(-1))


class Tagger(nn.Module):
    """A class of each token, or of all of them, from a recurrence over them."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.embed, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(words))
        return self.head(hidden[:, -1] if self.whole else hidden)


class Asking(Stacked):
    """Experts that ask for values, in a model that asks for some of its inputs."""

    def __init__(self) -> None:
        super().__init__(*(Expert() for _ in range(2)))

    def forward(self, words: Tensor) -> Tensor:
        if bool((words >= WORDS).any()):
            raise ValueError("no such word")
        return super().forward(words)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.feed = nn.Linear(WIDTH, 1), Feed()

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.gate(hidden).sigmoid()
        chosen = (weight[..., 0] > 0.5).nonzero(as_tuple=True)
        if not len(chosen[0]):
            return hidden
        return hidden.index_put(chosen, hidden[chosen] + self.feed(hidden[chosen]) * weight[chosen])


class Placed(nn.Module):
    """A layer that adds its own table of positions, from the number of tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(1, TOKENS, WIDTH)), Attending()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden + self.table[:, : hidden.shape[1]])


class BatchNormed(nn.Module):
    """A layer with batch norm, whose statistics are those of all tokens of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.statistics = Attending(), nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) + self.statistics(hidden.transpose(1, 2)).transpose(1, 2)


class Framed(nn.Module):
    """Attention within each of three frames of tokens, which follow the first token, as in models of videos."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Attending()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        frames = hidden[:, 1:].unflatten(1, (3, -1))  # [samples, frames, tokens, width]
        inner = self.inner(frames.flatten(0, 1)).view_as(frames)
        return torch.cat([hidden[:, :1], inner.flatten(1, 2)], 1)


class Video(Stacked):
    """Such layers for seven tokens, of which two ranks have different numbers."""

    def __init__(self) -> None:
        super().__init__(*(Framed() for _ in range(2)))

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words[:, :7])


class Cached(nn.Module):
    """A layer with a bias of positions, whose indices a method keeps for all layers, as in BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = Attending(), nn.Parameter(torch.randn(TOKENS, WIDTH))

    @staticmethod
    @lru_cache(maxsize=4)
    def indices(tokens: int) -> Tensor:
        return torch.arange(tokens).flip(0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) + self.table[self.indices(hidden.shape[1])]


class Dropping(nn.Module):
    """A norm of its own, with dropout in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden / hidden.square().mean(-1, keepdim=True).sqrt() * self.scale, 0.3, self.training)


class Looped(Stacked):
    """One layer that is called in a loop, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__(Attending())

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for _ in range(3):
            hidden = self.layers[0](hidden)
        return self.head(hidden)


class Choosing(Stacked):
    """Some tokens, which depend on the words alone, get features that a projection computes for all."""

    def __init__(self) -> None:
        super().__init__(Attending(), Attending())
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        hidden, chosen = self.embed(words), words % 3 == 0
        features = self.project(hidden)[chosen]
        hidden = hidden.masked_scatter(chosen[..., None], features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Dropped(Rolled):
    """Tokens that move, after a norm that drops some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Dropping()  # pyright: ignore[reportAttributeAccessIssue]


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "stages": lambda: Stacked(*(Stage() for _ in range(2))),
    "rolled": lambda: Stacked(*(Rolled() for _ in range(2))),
    "excited": lambda: Stacked(*(Excited() for _ in range(2))),
    "tokens first": lambda: TokensFirst(*(Feed() for _ in range(2))),
    "narrow": lambda: Stacked(*(nn.Sequential(Feed(), Narrow()) for _ in range(2))),
    "conditioned": Conditioned,
    "summing": Summing,
    "located": Located,
    "tagger": Tagger,
    "placed": lambda: Stacked(*(Placed() for _ in range(2))),
    "looped": Looped,
    "video": Video,
    "cached": lambda: Stacked(*(Cached() for _ in range(2))),
    "batch norm": lambda: Stacked(*(BatchNormed() for _ in range(2))),
    "choosing": Choosing,
    "dropping": lambda: Stacked(*(Dropped() for _ in range(2))),
    "recurrent": lambda: Tagger(whole=True),
    "asking": Asking,
}


class Tokens(samestep.Task):
    """One of the models, on random words: a class of each token, or of each text."""

    def __init__(self, *, name: str) -> None:
        self.name = name
        self.words = torch.randint(1, WORDS, (20, TOKENS), generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def train_set(self) -> samestep.Samples:
        return range(len(self.words))

    def collate(self, samples: Sequence[int]) -> samestep.Batch:
        words = self.words[list(samples)]
        return samestep.Batch(words, words)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        logits = output.flatten(0, -2)
        classes = batch.targets[:, : output.shape[1]] if output.ndim == 3 else batch.targets[:, 0]
        return F.cross_entropy(logits, classes.flatten() % 5, reduction="sum"), len(logits)
