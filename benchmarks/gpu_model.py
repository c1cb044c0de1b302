"""The models of benchmarks/gpu.py: Llamas on random tokens, whose steps are timed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.tasks.base import Work

SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a Llama, and the number of samples and tokens per step."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    length: int
    batch: int

    @property
    def parameters(self) -> int:
        """Parameters of the layers' matrices and of the tied embedding and output."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value_heads * head
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.vocabulary * self.hidden

    @property
    def flops(self) -> float:
        """FLOPs of a sample, forward and backward: 6 a weight and token, and attention (Chowdhery et al. 2022, B)."""
        return self.length * (6 * self.parameters + 12 * self.layers * self.hidden * self.length)


SIZES: Mapping[str, Size] = {
    "tiny": Size(
        layers=2, hidden=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=512, length=64, batch=4
    ),
    "350M": Size(
        layers=24,
        hidden=1024,
        heads=16,
        key_value_heads=16,
        feed_forward=2816,
        vocabulary=32000,
        length=2048,
        batch=8,
    ),
    "1B": Size(
        layers=16, hidden=2048, heads=32, key_value_heads=8, feed_forward=8192, vocabulary=32000, length=2048, batch=4
    ),
}


class Tokens(samestep.Task):
    """A Llama on random tokens, since only the time of a step matters."""

    def __init__(self, size: Size) -> None:
        self._size = size
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(size.vocabulary, (SAMPLES, size.length + 1), generator=generator)

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = self._size
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_value_heads,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def train_set(self) -> samestep.Samples:
        return range(SAMPLES)

    def collate(self, samples: Sequence[int]) -> samestep.Batch:
        chosen = self._tokens[list(samples)]  # [batch, length + 1]
        return samestep.Batch({"input_ids": chosen[:, :-1]}, chosen[:, 1:].contiguous())

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        logits = output.logits.flatten(0, 1).float()  # [batch * length, vocabulary]
        return nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum"), batch.targets.numel()

    def work(self) -> Work:
        return Work(tokens=self._size.length, flops=self._size.flops)
