"""Tasks on models that compute in float32 whatever their parameters are, or ask for complex numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from model_tasks import LANGUAGE_MODELS, NextWord, _config
from small_tasks import Points
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep


class Wide(torch.autograd.Function):
    """x ** 3, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x.float())
        return x.to(torch.float32).pow(3).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return (3 * x.square() * gradient.float()).to(gradient.dtype)


class CastingBlock(nn.Module):
    """Attention over 8 tokens with all that models do in float32: norm, rotary angles, softmax, scatter, a kernel."""

    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # pyright: ignore[reportReturnType]

    def inner(self, x: Tensor) -> Tensor:
        """x: [samples, tokens, width]."""
        wide = x.to(torch.float32)
        normed = self.scale * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
        q, k, v = self.qkv(normed).chunk(3, -1)
        q, k = turned(q), turned(k)
        weights = (q @ k.mT / x.shape[-1] ** 0.5).softmax(-1, dtype=torch.float32).to(x.dtype)
        mixed = weights @ v
        # Every second token's sum, gathered in float32.
        sums = torch.zeros(len(x), 2, x.shape[-1], dtype=torch.float32, device=x.device)
        sums.index_add_(1, torch.arange(x.shape[1], device=x.device) % 2, mixed.type(torch.float32))
        return x + self.out(mixed + sums.mean(1, keepdim=True).type_as(x)) + Wide.apply(mixed)


def turned(x: Tensor) -> Tensor:
    """Rotary positions, with angles made in float32 at each call (Su et al. 2021)."""
    half = x.shape[-1] // 2
    rates = 1 / 100 ** (torch.arange(half, device=x.device).float() / half)
    angles = torch.arange(x.shape[1], device=x.device).type("torch.FloatTensor")[:, None] * rates  # [tokens, half]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Casting(Points):
    """A few points make a sentence of 8 tokens; the loss and the scores cast to float32 too."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__(samples=24, held_out=7)
        self.reentrant = reentrant

    def model(self) -> nn.Module:
        blocks = [CastingBlock(8, self.reentrant) for _ in range(2)]
        return nn.Sequential(nn.Linear(4, 64), nn.Unflatten(1, (8, 8)), *blocks, nn.Flatten(), nn.Linear(64, 3))

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return F.cross_entropy(output.float(), batch.targets, reduction="sum"), len(output)

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.float().softmax(-1), batch.targets


def _bloom(layers: int, dropout: float) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    config = {"vocab_size": 37, "hidden_size": 24, "n_layer": layers, "n_head": 4, "hidden_dropout": dropout}
    return BloomForCausalLM(BloomConfig(**config, bos_token_id=None, eos_token_id=None))  # pyright: ignore


def _of(name: str, **values: Any) -> Callable[[int, float], nn.Module]:
    def make(layers: int, dropout: float) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(_config(name, layers, **values))

    return make


DECODERS: Mapping[str, Callable[[int, float], nn.Module]] = {
    "llama": LANGUAGE_MODELS["llama"],
    "bloom": _bloom,
    "gemma": _of("Gemma", num_key_value_heads=2, head_dim=6),
    "mixtral": _of("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "qwen2-moe": _of(
        "Qwen2Moe", num_key_value_heads=2, num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12
    ),
}


class Decoder(NextWord):
    """A transformers model that computes parts of itself in float32."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(kind=kind, samples=24, layers=2, dropout=0.0)
        self.held_out = self.held_out[:7]

    def model(self) -> nn.Module:
        return DECODERS[self.kind](self.layers, self.dropout)


class Filter(nn.Module):
    """Multiplies the spectrum of [samples, tokens, width] along the tokens with complex numbers that it learns."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.filter = nn.Parameter(torch.randn(tokens // 2 + 1, width, dtype=torch.complex64) * 0.3)
        self.turn = nn.Linear(width, width, dtype=torch.complex64)
        self.register_buffer("phase", torch.polar(torch.ones(width), torch.arange(width) / width))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(x), dim=1, norm="ortho")  # [samples, tokens / 2 + 1, width]
        spectrum = self.turn(spectrum * self.filter) * self.phase
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")


class Filters(Points):
    """Points as sentences of 8 tokens, mixed by filters of their spectrum (Rao et al. 2021)."""

    def __init__(self, **values: Any) -> None:
        super().__init__(samples=24, held_out=7, **values)

    def model(self) -> nn.Module:
        blocks = [Filter(8, 8) for _ in range(2)]
        return nn.Sequential(nn.Linear(4, 64), nn.Unflatten(1, (8, 8)), *blocks, nn.Flatten(), nn.Linear(64, 3))


class ComplexBlock(nn.Module):
    """Two complex layers with a nonlinearity between them, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=torch.complex64)
        self.down = nn.Linear(2 * width, width, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class AllComplex(Points):
    """Complex inputs, weights and hidden states; the logits are the magnitudes of the last layer."""

    def __init__(self, **values: Any) -> None:
        super().__init__(samples=24, held_out=7, **values)

    def collate(self, samples: Any) -> samestep.Batch:
        points, labels = super().collate(samples)
        return samestep.Batch(torch.complex(points, points.flip(-1)), labels)

    def model(self) -> nn.Module:
        ends = (nn.Linear(size, out, dtype=torch.complex64) for size, out in ((4, 8), (8, 3)))
        return nn.Sequential(next(ends), ComplexBlock(8), ComplexBlock(8), next(ends))

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output.abs(), batch)

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.abs(), batch.targets
