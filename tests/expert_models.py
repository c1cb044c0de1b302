"""Tiny mixtures of experts: their routers, lists and loops as people write them, and one of transformers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

WORDS, WIDTH = 30, 12


class Expert(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 20) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x))))


class Routed(nn.Module):
    """Two of the experts for each token; `masked` leaves words under 12 alone, `dense` gives every expert all."""

    def __init__(self, *, experts: int = 4, masked: bool = False, dense: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.masked, self.dense = masked, dense
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dropout) for _ in range(experts))
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        flat = self.norm(hidden).reshape(-1, WIDTH)
        scores = self.gate(flat).softmax(-1)
        weights, chosen = scores.topk(2)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.dense:
                made = made + expert(flat) * scores[:, number, None]
                continue
            wanted = chosen == number
            if self.masked:
                wanted = wanted & (words.reshape(-1, 1) >= 12)
            rows, slot = wanted.nonzero(as_tuple=True)
            if len(rows):
                made = made.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return hidden + self.dropout(made).view_as(hidden)


class Uneven(Routed):
    """Experts of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(width=8 + 4 * number) for number in range(4))


class Switch(nn.ModuleDict):
    """A dictionary of experts with a forward of its own: one expert a token, and the last is never chosen."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__({f"expert_{number}": Expert() for number in range(experts)})

    def forward(self, flat: Tensor, scores: Tensor) -> Tensor:
        weight, chosen = scores[:, :-1].max(-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.values()):
            mask = chosen == number
            if mask.any():
                made[mask] = expert(flat[mask]) * weight[mask, None]
        return made


class Switched(nn.Module):
    """A router that keeps a moving average of how often it chose which expert."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), Switch()
        self.register_buffer("usage", torch.full((4,), 0.25))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        flat = hidden.reshape(-1, WIDTH)
        scores = (self.gate(flat) - self.usage).softmax(-1)
        if self.training:
            by_sample = F.one_hot(scores.argmax(-1), 4).view(len(hidden), -1, 4).double().mean(1)
            self.usage.lerp_(by_sample.mean(0).to(self.usage.dtype), 0.1)
        return hidden + self.experts(flat, scores).view_as(hidden)


class Stack(nn.Module):
    """The weights of all experts in two parameters, called with tokens, weights and chosen experts."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.number_of_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 20) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 20, WIDTH) * 0.3)

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.number_of_experts):
            for slot in range(chosen.shape[-1]):
                mask = (chosen[..., slot] == expert)[..., None]
                made = made + F.gelu(tokens @ self.up[expert]) @ self.down[expert] * mask * weights[..., slot, None]
        return made


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.stack = nn.Linear(WIDTH, 4, bias=False), Stack()

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2)
        return hidden + self.stack(hidden, weights, chosen)


class Coupled(Routed):
    """Each expert is also given what the one before it made."""

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        flat = hidden.reshape(-1, WIDTH)
        chosen = self.gate(flat).argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen <= number).nonzero()[:, 0]
            flat = flat.index_add(0, rows, expert(flat[rows]))
        return hidden + flat.view_as(hidden)


class Plain(nn.Module):
    """No mixture: every token goes through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        return hidden + F.gelu(self.linear(hidden))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        heads = [layer(normed).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.attention, self.mixture = Attention(), mixture

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        return self.mixture(self.attention(hidden), words)


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(make()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden, words)
        return self.head(hidden)


class Scored(Routed):
    """Gives a number for each sample besides."""

    def forward(self, hidden: Tensor, words: Tensor) -> Any:
        return super().forward(hidden, words), self.gate(hidden).square().mean((1, 2))


class ScoredNet(Net):
    def __init__(self) -> None:
        super().__init__(Scored)

    def forward(self, words: Tensor) -> Tensor:
        hidden, scores = self.embed(words), 0.0
        for layer in self.layers:
            hidden, scored = layer(hidden, words)
            scores = scores + scored
        return self.head(hidden) * (1 + torch.as_tensor(scores)[:, None, None])


def _transformers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A tiny causal language model of a class of transformers."""
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "eos_token_id": None,
    }
    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    return lambda: model(config(**{**sizes, **options}))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "list": lambda: Net(Routed),
    "masked": lambda: Net(lambda: Routed(masked=True)),
    "dense": lambda: Net(lambda: Routed(dense=True)),
    "three": lambda: Net(lambda: Routed(experts=3)),
    "dropping": lambda: Net(lambda: Routed(dropout=0.1)),
    "scored": ScoredNet,
    "uneven": lambda: Net(Uneven),
    "dictionary": lambda: Net(Switched),
    "stack": lambda: Net(Stacked),
    "coupled": lambda: Net(Coupled),
    "none": lambda: Net(Plain),
    "mixtral": _transformers("Mixtral", num_local_experts=4),
    "qwen2-moe": _transformers(
        "Qwen2Moe", num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12
    ),
    "olmoe": _transformers("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek-v3": _transformers(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=12,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    ),
    "gpt-oss": _transformers(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=6,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
TRANSFORMERS = ("mixtral", "qwen2-moe", "olmoe", "deepseek-v3", "gpt-oss")


class Words(samestep.Task):
    """The next of random words. `balance`: a term that couples the tokens of all samples of a batch."""

    def __init__(self, *, name: str, balance: bool = False) -> None:
        self.name, self.balance = name, balance
        self.words = torch.randint(1, WORDS, (22, 10), generator=torch.Generator().manual_seed(1))
        self.words[::3] %= 12  # "masked" routes no word of these samples

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def train_set(self) -> samestep.Samples:
        return range(len(self.words))

    def eval_set(self) -> samestep.Samples:
        return range(5)

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        words = self.words[list(samples)]
        return samestep.Batch({"input_ids": words, "use_cache": False} if self.name in TRANSFORMERS else words, words)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        logits = getattr(output, "logits", output)
        following = batch.targets[:, 1:]
        total = F.cross_entropy(logits[:, :-1].transpose(1, 2), following, reduction="sum")
        if self.balance:
            total = total + logits.softmax(-1).mean((0, 1)).square().sum() * following.numel()
        return total, following.numel()

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return getattr(output, "logits", output), batch.targets

    def batch_buffers(self) -> Mapping[str, str]:
        return {"layers.*.mixture.usage": "mean"} if self.name == "dictionary" else {}
