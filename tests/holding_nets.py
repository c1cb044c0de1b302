"""Attentions, gated layers and blocks that hold parameters themselves, which all of their heads or features share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import samestep

WORDS, WIDTH, HEADS, TOKENS = 29, 24, 4, 9
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    """Attention whose subclasses change the queries, the scores, what the heads make, or the output."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        hidden = self.before(hidden)
        query, key, value = (self.apart(layer(hidden)) for layer in (self.q, self.k, self.v))
        query, key = self.queries(query, *more), self.keys(key)
        scores = query @ key.transpose(-2, -1) * HEAD**-0.5
        made = self.scores(scores, *more).softmax(-1) @ value  # [batch, heads, tokens, features of a head]
        made = self.heads(made, *more).transpose(1, 2).flatten(2)
        return self.after(self.out(self.features(made, hidden)))

    def apart(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def before(self, hidden: Tensor) -> Tensor:
        return hidden

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return query

    def keys(self, key: Tensor) -> Tensor:
        return key

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores

    def heads(self, made: Tensor, *more: Tensor) -> Tensor:
        return made

    def features(self, made: Tensor, hidden: Tensor) -> Tensor:
        return made

    def after(self, output: Tensor) -> Tensor:
        return output


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(shape))


class Scaled(Attention):
    """A scale of the features of a head, as TimesFM's, and its softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = drawn(HEAD)

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return query * F.softplus(self.scaling)


class ZeroAtFirst(Scaled):
    """What the attention adds begins at zero, which hides what is wrong in it."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(WIDTH))

    def after(self, output: Tensor) -> Tensor:
        return output * self.zero


class Temperature(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores * self.temperature.exp()


class TemperatureOfHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = drawn(HEADS, 1, 1)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores * self.temperature.exp()


class Biased(Attention):
    """A bias of all heads' scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = drawn(1, 1, TOKENS, TOKENS)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores + self.bias


class BiasedByHead(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.bias = drawn(HEADS, TOKENS, TOKENS)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores + self.bias


class Table(Attention):
    """A table of relative positions, with a column for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = drawn(2 * TOKENS - 1, HEADS)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        places = torch.arange(TOKENS)
        return scores + self.table[places[:, None] - places + TOKENS - 1].permute(2, 0, 1)


class SharedTable(Attention):
    """A table of relative positions of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = drawn(2 * TOKENS - 1)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        places = torch.arange(TOKENS)
        return scores + self.table[places[:, None] - places + TOKENS - 1]


class Gated(Attention):
    """A gate of each head, one of all, and one of each feature of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList([drawn(HEADS, 1, 1), drawn(1), drawn(HEADS, 1, HEAD), drawn(WIDTH)])

    def heads(self, made: Tensor, *more: Tensor) -> Tensor:
        return made * self.gates[0].sigmoid() * self.gates[1].sigmoid() * self.gates[2].tanh()

    def features(self, made: Tensor, hidden: Tensor) -> Tensor:
        return made * self.gates[3]


class GatedByInput(Attention):
    """A gate that is computed from the attention's input, before its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        gate = self.gate(hidden)
        query, key, value = (self.apart(layer(hidden)) for layer in (self.q, self.k, self.v))
        made = (query @ key.transpose(-2, -1) * HEAD**-0.5).softmax(-1) @ value
        return self.out(made.transpose(1, 2).flatten(2) * gate)


class Averaging(Attention):
    """Heads are multiplied by the mean of the attention's input."""

    def features(self, made: Tensor, hidden: Tensor) -> Tensor:
        return made * hidden.mean(-1, keepdim=True)


class InAndOut(Attention):
    """One scale of the queries and of the output, and one of the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.entry = nn.Parameter(torch.tensor(0.8)), drawn(WIDTH)

    def before(self, hidden: Tensor) -> Tensor:
        return hidden * self.entry.exp()

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return query * self.scale

    def after(self, output: Tensor) -> Tensor:
        return output * self.scale


class Normed(Attention):
    """Norms of queries and keys, one module for both, and a scale of layers after the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer_scale = nn.RMSNorm(HEAD), drawn(WIDTH)

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return self.norm(query)

    def keys(self, key: Tensor) -> Tensor:
        return self.norm(key)

    def after(self, output: Tensor) -> Tensor:
        return output * self.layer_scale


class Convolved(Attention):
    """A kernel of all heads over the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = drawn(1, 1, 3, 3)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return F.conv2d(scores.flatten(0, 1)[:, None], self.kernel, padding=1)[:, 0].view_as(scores)


class Mixed(Attention):
    """Talking heads: every head's scores are mixed from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = drawn(HEADS, HEADS)

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", scores, self.mix)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Parametrized(Temperature):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self, "temperature", Exp())


class Frozen(Scaled):
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scaling.requires_grad_(False)
        self.register_buffer("factor", torch.rand(HEAD) + 0.5)

    def keys(self, key: Tensor) -> Tensor:
        return key * self.factor


class Remembering(Attention):
    """Multiplies queries by a parameter that is not its own, nor given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[nn.Parameter] = []

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return query * self.others[0]


class Told(Attention):
    """Multiplies queries by what it is told, adds what it is told to scores."""

    def queries(self, query: Tensor, *more: Tensor) -> Tensor:
        return query * more[0]

    def scores(self, scores: Tensor, *more: Tensor) -> Tensor:
        return scores + more[1]


class Fused(Gated):
    """PyTorch's function of attention, with a scale, a temperature and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.temperature = drawn(HEAD), nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        query, key, value = (self.apart(layer(hidden)) for layer in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(query * self.scaling, key * self.temperature, value)
        made = self.heads(made).transpose(1, 2).flatten(2)
        return self.out(self.features(made, hidden))


class Expert(nn.Module):
    """An expert with a scale of its hidden features, of its own or of all experts."""

    def __init__(self, scale: nn.Parameter | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.scale, self.each = drawn(1) if scale is None else scale, drawn(20)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale.exp() * self.each)


class Experts(nn.Module):
    """Each token goes to the one of four experts that its router prefers."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        scale = drawn(1) if shared else None
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Expert(scale) for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = (self.router(flat) * self.temperature).softmax(-1).max(-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return made.view_as(x)


class Masked(nn.Module):
    """PyTorch's attention with a bias that is trained as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.bias = drawn(TOKENS, TOKENS)

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        return self.inner(hidden, hidden, hidden, attn_mask=self.bias, need_weights=False)[0]


class Perceptron(nn.Module):
    """A gated layer with scales of its hidden features, of all of them, and before and after them."""

    def __init__(self, hidden: int = 22, *, both: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.each, self.all, self.slope = drawn(hidden), drawn(1), nn.Parameter(torch.tensor(1.1))
        self.entry, self.exit = drawn(WIDTH), drawn(WIDTH)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.entry.exp()
        made = self.gate(x) * torch.sigmoid(self.slope * self.gate(x)) * self.up(x) * self.each.exp() + self.all
        made = self.down(made) * self.exit
        return made * self.all if self.both else made


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, perceptron: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), attention
        self.norm2, self.perceptron = nn.LayerNorm(WIDTH), perceptron

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), *more)
        return hidden + self.perceptron(self.norm2(hidden))


class Net(nn.Module):
    """Layers that hand on a hidden state, between an embedding and an output layer."""

    def __init__(
        self, attention: Callable[[], nn.Module] = Attention, perceptron: Callable[[], nn.Module] = Plain
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(attention(), perceptron()) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden, *self.more(hidden))
        return self.head(hidden)

    def more(self, hidden: Tensor) -> Sequence[Tensor]:
        return ()


class Tied(Net):
    """One scale in all attentions."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        first, *others = (module for module in self.modules() if isinstance(module, Scaled))
        for attention in others:
            attention.scaling = first.scaling


class RememberingPerceptron(Plain):
    """The same with what it adds to the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.others[0]


class Remembered(Net):
    """A scale of the model's own, which its attentions or perceptrons keep in a list."""

    def __init__(self, size: int, **kinds: Callable[[], nn.Module]) -> None:
        super().__init__(**kinds)
        self.scale = drawn(size)
        for module in self.modules():
            if isinstance(module, (Remembering, RememberingPerceptron)):
                module.others.append(self.scale)


class Telling(Net):
    """A scale and a bias of the model's own, which it hands to its layers."""

    def __init__(self, *shape: int, both: bool = False) -> None:
        super().__init__(Told)
        self.scale, self.bias, self.both = nn.Parameter(torch.tensor(0.9)), drawn(*shape), both

    def more(self, hidden: Tensor) -> Sequence[Tensor]:
        return self.scale.exp(), self.bias

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * (self.scale if self.both else 1)


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "scaled": lambda: Net(Scaled),
    "scaled, zero at first": lambda: Net(ZeroAtFirst),
    "temperature": lambda: Net(Temperature),
    "temperature of heads": lambda: Net(TemperatureOfHeads),
    "biased": lambda: Net(Biased),
    "biased by head": lambda: Net(BiasedByHead),
    "table": lambda: Net(Table),
    "shared table": lambda: Net(SharedTable),
    "gated": lambda: Net(Gated),
    "gated by input": lambda: Net(GatedByInput),
    "averaging": lambda: Net(Averaging),
    "in and out": lambda: Net(InAndOut),
    "normed": lambda: Net(Normed),
    "convolved": lambda: Net(Convolved),
    "mixed": lambda: Net(Mixed),
    "parametrized": lambda: Net(Parametrized),
    "frozen": lambda: Net(Frozen),
    "masked": lambda: Net(Masked),
    "perceptron": lambda: Net(perceptron=Perceptron),
    "perceptron, in and out": lambda: Net(perceptron=lambda: Perceptron(both=True)),
    "fused": lambda: Net(Fused),
    "experts": lambda: Net(perceptron=Experts),
    "experts with one scale": lambda: Net(perceptron=lambda: Experts(shared=True)),
    "tied": Tied,
    "remembered": lambda: Remembered(HEAD, attention=Remembering),
    "remembered by token": lambda: Remembered(WIDTH, perceptron=RememberingPerceptron),
    "told": lambda: Telling(1, 1, TOKENS, TOKENS),
    "told by head": lambda: Telling(1, HEADS, TOKENS, TOKENS),
    "told, in and out": lambda: Telling(1, 1, TOKENS, TOKENS, both=True),
}


class Holding(samestep.Task):
    """One of the nets: the next word."""

    def __init__(self, *, name: str, samples: int = 40) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (samples, TOKENS), generator=generator)
        self.name = name

    def model(self) -> nn.Module:
        return NETS[self.name]()

    def train_set(self) -> samestep.Samples:
        return list(self.words)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        words: Any = batch.inputs
        entropy = F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
        return entropy, words[:, 1:].numel()

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        words = torch.stack(list(samples))
        return samestep.Batch(words, words)
