"""Models whose construction is recorded: layers, initialisers, tiny models of transformers, and what can't be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

Make = Callable[[], nn.Module]


class Alone(nn.Module):
    """A lone weight, and what initialises it."""

    def __init__(self, initialise: Callable[[Tensor], Any], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape or (7, 33)))
        initialise(self.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        init.normal_(self.head.weight, std=0.02)


class Buffers(nn.Module):
    """Tables that are computed, saved or not, of floats and of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        angles = torch.outer(torch.linspace(0, 6, 7), frequencies)
        self.register_buffer("angles", torch.cat([angles.cos(), angles.sin()], dim=1))
        self.register_buffer("positions", torch.arange(7), persistent=False)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())
        noise = torch.randn(3)
        self.register_buffer("noise", noise, persistent=False)
        self.weight = nn.Parameter(torch.randn(4, 3) * noise)


class Legacy(nn.Module):
    """Older ways to make a parameter, each with a value that Python looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.Tensor(6, 5))
        self.first.data.uniform_(-1, 1)
        self.second = nn.Parameter(torch.zeros_like(self.first, device=self.first.device))
        self.second.data[:, 1:3] = self.first.data[:, 2:4] * 2
        with torch.no_grad():
            self.first[self.first > 0.5] = 0
            while self.first.abs().sum() > 10:
                self.first.mul_(0.9)
        self.third = nn.Parameter(self.first.new_tensor([1.0, 2.0]).mul(self.second.detach().cpu()[0, 1]))
        self.fourth = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(1)))
        self.fifth = nn.Parameter(torch.bernoulli(torch.rand(9)) + torch.normal(torch.arange(9.0), 0.1))
        self.register_parameter("nothing", None)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


LAYERS: dict[str, Make] = {
    "linear": lambda: nn.Linear(5, 7),
    "conv": lambda: nn.Conv2d(3, 5, 3),
    "embedding": lambda: nn.Embedding(11, 5, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm(5),
    "batch norm": lambda: nn.BatchNorm2d(5),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": _encoder,
    "lstm": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "trunc_normal": lambda: Alone(init.trunc_normal_),
    "trunc_normal, seldom accepted": lambda: Alone(lambda w: init.trunc_normal_(w, 0, 1, -0.1, 0.1)),
    "orthogonal, wide": lambda: Alone(init.orthogonal_),
    "orthogonal, tall": lambda: Alone(init.orthogonal_, 40, 9),
    "kaiming": lambda: Alone(init.kaiming_normal_),
    "xavier": lambda: Alone(init.xavier_uniform_),
    "sparse": lambda: Alone(lambda w: init.sparse_(w, 0.3)),
    "dirac": lambda: Alone(init.dirac_, 4, 5, 3),
    "channels last": lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),  # pyright: ignore
    "bfloat16": lambda: nn.Linear(5, 7, dtype=torch.bfloat16),
    "double": lambda: nn.Linear(5, 7).double(),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 7)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 7)),
    "orthogonal parametrization": lambda: parametrizations.orthogonal(nn.Linear(5, 7)),
    "tied": Tied,
    "buffers": Buffers,
    "legacy": Legacy,
}


class WrittenByNumpy(nn.Linear):
    """Its memory is written by NumPy."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.weight.detach().numpy().fill(1)


class Swallowed(nn.Linear):
    """The same, in a way that hides that it failed."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        try:
            self.weight.detach().numpy().fill(1)
        except Exception:
            self.weight.data.fill_(7)


class Shared(nn.Linear):
    """A parameter's memory under another name, and in another parameter."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__(3, 2)
        self.alias = nn.Parameter(self.weight.data[0]) if parameter else self.weight.data[0]


class Viewed(nn.Linear):
    """A tensor that is no parameter, and a view of it."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = torch.rand(3)
        self.register_buffer("view", self.scale[1:])


class Moved(nn.Linear):
    """A move to the CPU, which is no copy, written into."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.weight.data.to("cpu").fill_(3)


REFUSED: dict[str, Make] = {
    "lazy": lambda: nn.LazyLinear(3),
    "written-by-numpy": WrittenByNumpy,
    "swallowed": Swallowed,
    "shared with a tensor": lambda: Shared(parameter=False),
    "shared with a parameter": lambda: Shared(parameter=True),
    "viewed": Viewed,
    "moved": Moved,
}

_SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_SIZES, num_labels=3))  # pyright: ignore


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=12, n_layer=2, n_head=2, n_positions=16))


def _llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(LlamaConfig(**_SIZES, dtype="bfloat16"))  # pyright: ignore


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_key_value_heads=1, tie_word_embeddings=True))  # pyright: ignore


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=37, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=2))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4))  # pyright: ignore


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=6, hidden_sizes=[6, 10], depths=[1, 2], layer_type="basic")
    )


HUGGING_FACE: dict[str, Make] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
}
