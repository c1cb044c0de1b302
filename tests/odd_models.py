"""Odd models that people build, tiny: no lists of like blocks that each hand on one tensor, or not those alone."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import samestep

WORDS = 29
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 24}


class Layer(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module] = lambda linear: linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), wrap(nn.Linear(12, 20)), wrap(nn.Linear(20, 12))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """An embedding, some layers and an output layer, each layer called with what the one before it gave."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(WORDS, 12), nn.ModuleList(layers), nn.Linear(12, WORDS)

    def forward(self, words: Tensor) -> Any:
        return self.head(self.between(self.embed(words)))

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Scaled(Net):
    """Scalars: trained ones in each layer and at the end, a frozen one, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        self.gains = nn.ParameterList(torch.tensor(0.5 + i) for i in range(3))
        self.gains[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def between(self, hidden: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            hidden = layer(hidden) * gain
        return hidden


class Start(nn.Module):
    """Gives a trained vector for each sample: a view of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12))

    def forward(self, samples: int) -> Tensor:
        return self.weight.expand(samples, 1, -1)


class Places(nn.Module):
    """Gives the first rows of a table, and of one of them a view without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 12, generator=torch.Generator().manual_seed(2)))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            first = self.table[0]
        return self.table[:length], first


class Views(Net):
    """Modules of which nothing but views of their parameters comes: a start, and places, used in every stage."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(4)))
        self.start, self.places = Start(), Places()

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.cat([self.start(len(words)), self.embed(words)], dim=1)
        places, first = self.places(hidden.shape[1])
        return self.head(self.between(hidden + places - first))[:, 1:]


class Asked(nn.Module):
    """Two layers, called by what holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())


class AsksParameters(Net):
    """Before it calls its layers, the forward asks parameters for their dtype and device, and how many there are."""

    def __init__(self) -> None:
        super().__init__(Layer(), Layer())
        self.pair, self.last = Asked(), Layer()

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.between(self.embed(words)).type(self.pair.dtype)
        hidden = self.pair.second(self.pair.first(hidden)) / sum(each.numel() for each in self.layers[0].parameters())
        hidden = hidden.to(next(self.last.parameters(recurse=True)).device).to(next(self.embed.parameters()).dtype)
        count = sum(1 for _ in self.last.parameters(recurse=False)) + sum(1 for _ in self.last.norm.parameters())
        return self.head(self.last(hidden) / count)


class Gained(Net):
    """A parameter of the layers themselves, which works on each token."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.7))

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * self.gain

    def __init__(self) -> None:
        super().__init__(*(Gained.Layer() for _ in range(3)))


class Unlisted(tuple[int, ...]):
    """A sequence that is none, as e3nn's lists of representations are: it has no length and can't be gone over."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


class Lists(Net):
    """Each layer is a list of modules; an attribute is a sequence that can't be gone over."""

    def __init__(self) -> None:
        super().__init__(*(nn.ModuleList([nn.LayerNorm(12), Layer(), nn.Linear(12, 12)]) for _ in range(3)))
        self.kinds = Unlisted((1, 2))

    def between(self, hidden: Tensor) -> Tensor:
        for norm, inner, last in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            hidden = hidden + last(inner(norm(hidden)))
        return hidden


class Methods(Net):
    """Layers whose forward is never called, and a weight that is used outside of its layer."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))

    def between(self, hidden: Tensor) -> Tensor:
        first: Any = self.layers[0]
        for layer in self.layers:
            hidden = Layer.forward(layer, hidden)  # pyright: ignore[reportArgumentType]
        return hidden + F.linear(F.linear(hidden, first.up.weight), first.down.weight)


class Used(Net):
    """A layer that is called, and whose weight is used once more elsewhere."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))

    def between(self, hidden: Tensor) -> Tensor:
        first: Any = self.layers[0]
        hidden = super().between(hidden)
        return hidden + F.linear(F.linear(hidden, first.up.weight), first.down.weight)


class ByValue(Net):
    """Samples decide which layers run, of different sizes, so that ranks run different ones."""

    def __init__(self) -> None:
        super().__init__(Layer(), Layer(), nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12)))

    def between(self, hidden: Tensor) -> Tensor:
        rows = [self.layers[0 if row.sum() > 0 else 2](row) for row in hidden]
        return self.layers[1](torch.stack(rows))


class Masked(Net):
    """Every layer's output is gated by a tensor that autograd does not follow: what `made_from` gives, detached."""

    def __init__(self, made_from: str, *, detached: bool) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        self.made_from, self.detached = made_from, detached

    def between(self, hidden: Tensor) -> Tensor:
        gate = torch.ones(())
        for number, layer in enumerate(self.layers):
            if number == (self.made_from == "layer"):
                gate = self.gate(hidden)
            hidden = layer(hidden) * gate
        return hidden

    def gate(self, hidden: Tensor) -> Tensor:
        if self.detached:
            return hidden.detach().mean(-1, keepdim=True).sigmoid()
        with torch.no_grad():
            return hidden.mean(-1, keepdim=True).sigmoid()


class OwnGradient(Layer):
    """A layer that moves its input against the gradient of an energy, taken in its own forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        energy = super().forward(hidden).pow(2).sum()
        (gradient,) = torch.autograd.grad(energy, hidden, create_graph=True)
        return hidden - 0.1 * gradient


class Penalized(Net):
    """A model whose output depends on the gradient of its layers' output."""

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        logits = self.head(self.between(hidden))
        (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), hidden, create_graph=True)
        return logits + gradient.pow(2).sum(-1, keepdim=True) * logits.sin()


class InPlace(Net):
    """What the embedding and the layers give is changed in place; that of the layers is a view."""

    class Layer(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            up: Any = self.up
            return self.down(F.linear(super().forward(hidden), up.weight))

    def __init__(self) -> None:
        super().__init__(*(InPlace.Layer() for _ in range(4)))
        self.shift = nn.Parameter(torch.linspace(0, 1, 12))

    def between(self, hidden: Tensor) -> Tensor:
        hidden += self.shift
        hidden[:, 0] = self.shift
        for layer in self.layers:
            hidden = layer(hidden)
            hidden += self.shift
            hidden[..., :2].mul_(0.7)
        return F.relu(hidden, inplace=True)


class Biased(nn.Module):
    """Adds its bias to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(0, 1, 12))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += self.bias
        return hidden.tanh()


class BiasedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.linear = Biased(), nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.bias(hidden)) + hidden


class WritesToItsInput(Net):
    """Layers that change what they are given, which is used again afterwards."""

    def __init__(self) -> None:
        super().__init__(Layer(), Biased(), BiasedInside(), Layer(), Biased())

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden) + hidden
        return hidden


class Rescaled(Net):
    """Its layers' weights are halved in place for evaluation, and doubled again for training."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(4)))
        self.halved = False

    def between(self, hidden: Tensor) -> Tensor:
        if self.halved == self.training:
            with torch.no_grad():
                for layer in self.layers:
                    down: Any = layer.down
                    down.weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        return super().between(hidden)


class Reshaped(nn.Module):
    """An attention that reshapes what its linears give into a number of heads that stands in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, words, _ = hidden.shape
        queries, keys, values = (each(hidden).view(samples, words, 2, -1) for each in (self.q, self.k, self.v))
        weights = self.drop(torch.einsum("bqhd,bkhd->bhqk", rotated(queries), rotated(keys)).softmax(-1))
        return hidden + self.out(torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2))


def rotated(heads: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of heads of 6 features: [samples, words, heads, 6]."""
    angles = torch.arange(heads.shape[1], dtype=heads.dtype)[:, None, None] * torch.tensor([1.0, 0.1, 0.01])
    cosine, sine = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    return heads * cosine + torch.cat([-heads[..., 3:], heads[..., :3]], -1) * sine


class Crossed(nn.Module):
    """Queries of the words' mean and keys of the words, linears one after the other that don't feed each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        queries = self.q(hidden.mean(1, keepdim=True))
        weights = (queries * self.k(hidden)).sum(-1, keepdim=True).softmax(1)
        return hidden + self.down(F.gelu(self.up(self.norm(weights * hidden))))


class Checkpointed(Net):
    """Layers that the model recomputes by itself, in a backward inside of the backward."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            made = checkpoint(layer, hidden, use_reentrant=True)
            assert isinstance(made, Tensor)
            hidden = made
        return hidden


class Recomputed(Net):
    """Layers that the model recomputes by itself, each alone or all in one."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__(*(Layer() for _ in range(4)))
        self.together = together

    def between(self, hidden: Tensor) -> Tensor:
        for layer in [super().between] if self.together else self.layers:
            made = checkpoint(layer, hidden, use_reentrant=False)
            assert isinstance(made, Tensor)
            hidden = made
        return hidden


class Packed(Net):
    """Recurrent layers of texts of several lengths, which hand on packed sequences."""

    def __init__(self) -> None:
        super().__init__(*(nn.LSTM(12, 12, batch_first=True) for _ in range(3)))

    def forward(self, words: Tensor) -> Any:
        lengths = (1 + words[:, 0] % words.shape[1]).cpu()
        hidden = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return self.head(pad_packed_sequence(hidden, batch_first=True, total_length=words.shape[1])[0])


class Rebuilt(torch.autograd.Function):
    """Calls a layer without a graph, and once more for the gradient, which it takes by itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        return layer(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        of_hidden, *rest = torch.autograd.grad(output, [hidden, *ctx.layer.parameters()], gradient)
        return of_hidden, None, *rest


class OfFunctions(Net):
    """Layers that an autograd.Function calls, from the model's own forward."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = Rebuilt.apply(hidden, layer, *layer.parameters())
        return hidden


class WithFunction(nn.Module):
    """A layer that calls its one part by an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Layer()

    def forward(self, hidden: Tensor) -> Any:
        return Rebuilt.apply(hidden, self.part, *self.part.parameters())


class Experts(nn.Module):
    """A mixture of experts that gathers each expert's words."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 3), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                made = made.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return hidden + made.view_as(hidden)


class Transposed(Net):
    """Parameters that are no contiguous memory."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(2)))
        self.mix = nn.Parameter(torch.randn(12, 12).t() * 0.3)
        self.head.weight = nn.Parameter(torch.randn(12, WORDS).t())

    def between(self, hidden: Tensor) -> Tensor:
        return super().between(hidden) @ self.mix


class Plain:
    """What a model of one's own may give: a class that PyTorch knows nothing of."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Objects(Net):
    def __init__(self) -> None:
        super().__init__(Layer(), Layer())

    def forward(self, words: Tensor) -> Any:
        return Plain(super().forward(words))


class Bare(nn.Module):
    """Parameters alone, in the model itself and in lists and dictionaries of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, 12))
        self.listed = nn.ParameterList([torch.randn(12, 12), torch.randn(12)])
        self.named = nn.ParameterDict({"out": torch.randn(12, WORDS)})

    def forward(self, words: Tensor) -> Tensor:
        return torch.tanh(self.table[words] @ self.listed[0] + self.listed[1]) @ self.named["out"]


class Recurrent(nn.Module):
    """A layer that gives its state too, which nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(12, 12, batch_first=True), nn.LayerNorm(12)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Any]:
        made, state = self.rnn(hidden)
        return self.norm(hidden + made), state


class WithStates(Net):
    def __init__(self) -> None:
        super().__init__(*(Recurrent() for _ in range(4)))

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


class PassedOn(Net):
    """Layers that pass on what they were given: the first hidden state, and a mask."""

    class Layer(Layer):
        def forward(self, hidden: Tensor, first: Tensor, mask: Tensor) -> Any:  # pyright: ignore
            return super().forward(hidden) * mask + 0.1 * first, first, mask

    def __init__(self) -> None:
        super().__init__(*(PassedOn.Layer() for _ in range(4)))

    def between(self, hidden: Tensor) -> Tensor:
        first, mask = hidden, torch.linspace(0.5, 1, hidden.shape[1], dtype=hidden.dtype)[:, None]
        for layer in self.layers:
            hidden, first, mask = layer(hidden, first, mask)
        return hidden * mask


class Cached(Net):
    """What its first forward makes is kept, as an attribute and in a dictionary."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        self.shift: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    def between(self, hidden: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = torch.linspace(0, 1, 12, dtype=hidden.dtype)
        words = hidden.shape[1]
        if words not in self.tables:
            self.tables[words] = torch.linspace(0, 1, words, dtype=hidden.dtype)[:, None]
        return super().between(hidden + self.shift + self.tables[words])


class Hidden(Net):
    """Linears whose features meet in a sum between them, where a trace of modules sees nothing."""

    class Layer(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            made = self.up(self.norm(hidden))
            return hidden + self.down(made - made.mean(-1, keepdim=True))

    def __init__(self) -> None:
        super().__init__(*(Hidden.Layer() for _ in range(3)))


class Hooked(Net):
    """Half of a weight's gradient is masked by a hook."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        mask = torch.arange(20)[:, None] % 2
        self.layers[0].get_parameter("up.weight").register_hook(lambda gradient: gradient * mask)


class Mixed(Net):
    """Linear layers one after the other, with what mixes their features in between."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12))

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            made = layer(hidden)
            hidden = made - made.mean(-1, keepdim=True)
        return hidden


class Chosen(Net):
    """Adapters in a list beside the layers, of which samples choose by their first word."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        self.adapters = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, words: Tensor) -> Any:
        hidden = self.between(self.embed(words))
        kinds = words[:, 0] % len(self.adapters)
        adapted = hidden.clone()
        for kind in kinds.unique().tolist():
            rows = (kinds == kind).nonzero()[:, 0]
            adapted[rows] = self.adapters[kind](hidden[rows])
        return self.head(adapted)


class Pooled(Net):
    """Layers that take a row a sample."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))

    def forward(self, words: Tensor) -> Any:
        pooled = self.between(self.embed(words).mean(1))
        return self.head(pooled)[:, None].expand(-1, words.shape[1], -1)


class Cancelling(Net):
    """A batch norm whose running mean is of numbers that cancel out: rounding is all that it has."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(3)))
        self.norm = nn.BatchNorm1d(1)

    def between(self, hidden: Tensor) -> Tensor:
        centred = F.layer_norm(super().between(hidden), hidden.shape[-1:])
        return self.norm(centred.flatten(1)[:, None]).view_as(hidden)


class Failing(Layer):
    """Fails where it runs in one of several processes."""

    def __init__(self, ranks: Sequence[int], *, in_backward: bool = False) -> None:
        super().__init__()
        self.ranks, self.in_backward = ranks, in_backward

    def forward(self, hidden: Tensor) -> Tensor:
        here = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() in self.ranks
        hidden = super().forward(hidden)
        if here and self.in_backward and hidden.requires_grad:
            hidden.register_hook(self.fail)
        elif here:
            self.fail()
        return hidden

    @staticmethod
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")


def _old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and in many models
        return nn.utils.weight_norm(linear)


def _parametrized(wrap: Any) -> Callable[[], nn.Module]:
    return lambda: Net(*(Layer(wrap) for _ in range(4)))


def _graphs() -> nn.Module:
    """Layers as torch.fx has them, whose classes have attributes and a construction of their own."""
    return Net(*(symbolic_trace(Layer()) for _ in range(4)))


def _bart() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 4, f"{side}_ffn_dim": 40}
    config = transformers.BartConfig(vocab_size=WORDS, **sizes, decoder_start_token_id=2)
    return transformers.BartForConditionalGeneration(config)


def _bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(**SIZES, n_layer=3, n_head=4))


def _swin() -> nn.Module:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "window_size": 2, "num_labels": 3}
    config = transformers.SwinConfig(**sizes, depths=[1, 1, 2], num_heads=[2, 2, 4], drop_path_rate=0.0)
    return transformers.SwinForImageClassification(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "scalars": Scaled,
    "gains": Gained,
    "views": Views,
    "asks parameters": AsksParameters,
    "lists": Lists,
    "methods": Methods,
    "used elsewhere": Used,
    "by value": ByValue,
    "experts": lambda: Net(*(Experts() for _ in range(2))),
    "transposed": Transposed,
    "objects": Objects,
    "bare": Bare,
    "states": WithStates,
    "passed on": PassedOn,
    "cached": Cached,
    "chosen": Chosen,
    "hidden": Hidden,
    "gates of words": lambda: Masked("embedding", detached=False),
    "detached gates of words": lambda: Masked("embedding", detached=True),
    "gates of a layer": lambda: Masked("layer", detached=False),
    "detached gates of a layer": lambda: Masked("layer", detached=True),
    "own gradient": lambda: Net(*(OwnGradient() for _ in range(3))),
    "penalized": lambda: Penalized(*(Layer() for _ in range(3))),
    "shared": lambda: Net(*[Layer()] * 3),
    "weight norm": _parametrized(parametrizations.weight_norm),
    "orthogonal": _parametrized(parametrizations.orthogonal),
    "old weight norm": _parametrized(_old_weight_norm),
    "spectral norm": _parametrized(parametrizations.spectral_norm),
    "old spectral norm": _parametrized(nn.utils.spectral_norm),
    "fails in ranks": lambda: Net(Layer(), Failing([0, 1]), Layer()),
    "fails on one rank": lambda: Net(Layer(), Failing([1]), Layer()),
    "fails in backward": lambda: Net(Layer(), Failing([0], in_backward=True), Layer()),
    "hooked": Hooked,
    "mixed": Mixed,
    "cancelling": Cancelling,
    "pooled": Pooled,
    "in place": InPlace,
    "writes to its input": WritesToItsInput,
    "rescaled": Rescaled,
    "reshaped": lambda: Net(*(Reshaped() for _ in range(2))),
    "crossed": lambda: Net(*(Crossed() for _ in range(2))),
    "checkpointed": Checkpointed,
    "recomputed": Recomputed,
    "recomputed together": lambda: Recomputed(together=True),
    "packed": Packed,
    "called by functions": OfFunctions,
    "layers with functions": lambda: Net(*(WithFunction() for _ in range(3))),
    "graphs": _graphs,
    "bart": _bart,
    "bart as long": _bart,  # as many tokens in the decoder as in the encoder
    "bart by chance": _bart,  # only in the first samples
    "bloom": _bloom,
    "swin": _swin,
}


class Odd(samestep.Task):
    """One of the models, on random words or images: the next word, or a class of three."""

    def __init__(self, *, name: str, samples: int = 22) -> None:
        generator = torch.Generator().manual_seed(1)
        self.name = name
        self.words = torch.randint(1, WORDS, (samples, 10), generator=generator)
        self.images = torch.randn(samples, 3, 32, 32, generator=generator)

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def train_set(self) -> samestep.Samples:
        return range(len(self.words))

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        chosen = list(samples)
        words = self.words[chosen]
        if self.name == "swin":
            return samestep.Batch({"pixel_values": self.images[chosen]}, words[:, 0] % 3)
        if MODELS[self.name] is _bart:
            long = self.name == "bart as long" or (self.name == "bart by chance" and max(chosen) < 4)
            after = words if long else words[:, :6]
            return samestep.Batch({"input_ids": words, "decoder_input_ids": after, "use_cache": False}, after)
        if self.name == "bloom":
            return samestep.Batch({"input_ids": words, "use_cache": False}, words)
        return samestep.Batch(words, words)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        logits = getattr(output, "logits", output)
        if logits.ndim == 2:
            return F.cross_entropy(logits, batch.targets, reduction="sum"), len(logits)
        following = batch.targets[:, 1:]
        logits = logits[:, :-1].transpose(1, 2)  # [samples, words, following words]
        return F.cross_entropy(logits, following, reduction="sum"), following.numel()
