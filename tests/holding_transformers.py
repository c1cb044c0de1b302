"""Tiny models of transformers whose attentions or gated layers hold parameters of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import samestep

WORDS, TOKENS = 57, 12
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
SPEECH = {
    **SIZES,
    **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    **{"conv_depthwise_kernel_size": 3, "feat_extract_norm": "layer"},
}
TIMES = {**SIZES, "patch_length": 8, "context_length": 32, "horizon_length": 8, "head_dim": 4}


def _words(index: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {"input_ids": torch.randint(3, WORDS, (TOKENS,), generator=generator)}


def _pairs(index: int) -> Mapping[str, Tensor]:
    return {**_words(index), "decoder_input_ids": _words(index)["input_ids"].flip(0)}


def _numbers(name: str, *shape: int) -> Callable[[int], Mapping[str, Tensor]]:
    return lambda index: {name: torch.randn(shape, generator=torch.Generator().manual_seed(index))}


def _made(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**values))


def _text(name: str, **values: Any) -> Callable[[], nn.Module]:
    words = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return _made(f"{name}ForCausalLM", f"{name}Config", **words, **GROUPED, **values)


_PIXELS, _SOUND, _SERIES = (
    _numbers("pixel_values", 3, 32, 32),
    _numbers("input_values", 400),
    _numbers("past_values", 32),
)
_T5 = {"d_model": 16, "d_kv": 4, "num_heads": 4, "num_layers": 2, "d_ff": 32, "decoder_start_token_id": 0}

MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Mapping[str, Tensor]]]] = {
    # A scale of the features of a head; norms of queries and keys.
    "timesfm 2.5": (
        _made(
            "TimesFm2_5ModelForPrediction", "TimesFm2_5Config", **TIMES, num_key_value_heads=4, output_quantile_len=16
        ),
        _SERIES,
    ),
    "timesfm": (_made("TimesFmModelForPrediction", "TimesFmConfig", **TIMES), _SERIES),
    "qwen3": (_text("Qwen3", head_dim=6), _words),
    "gemma3": (_made("Gemma3ForCausalLM", "Gemma3TextConfig", vocab_size=WORDS, **GROUPED, head_dim=6), _words),
    "cohere": (_text("Cohere", use_qk_norm=True), _words),
    # A number for each head in the softmax.
    "granite with sinks": (_text("GraniteSWA"), _words),
    "doge": (_text("Doge"), _words),
    "differential llama": (_text("DiffLlama", head_dim=4), _words),
    # Biases of heads, and tables of relative positions.
    "funnel": (
        _made(
            "FunnelBaseModel", "FunnelConfig", vocab_size=WORDS, block_sizes=[1, 1], d_model=24, n_head=4, d_head=6
        ),
        _words,
    ),
    "conformer": (_made("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", **SPEECH), _SOUND),
    "t5": (_made("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, **_T5), _pairs),
    "beit": (_made("BeitModel", "BeitConfig", **PATCHES, use_relative_position_bias=True), _PIXELS),
    "beit with one table": (
        _made("BeitModel", "BeitConfig", **PATCHES, use_shared_relative_position_bias=True),
        _PIXELS,
    ),
    "vitdet": (
        _made(
            "VitDetModel",
            "VitDetConfig",
            **PATCHES,
            pretrain_image_size=32,
            use_relative_position_embeddings=True,
        ),
        _PIXELS,
    ),
    "sam": (
        _made("SamVisionModel", "SamVisionConfig", **PATCHES, mlp_dim=32, window_size=2, global_attn_indexes=[1]),
        _PIXELS,
    ),
    "swin 2": (
        _made(
            "Swinv2Model",
            "Swinv2Config",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        _PIXELS,
    ),
}


class Transformer(samestep.Task):
    """One of the models: a weighted sum of its first output and of that squared."""

    def __init__(self, *, name: str, samples: int = 16) -> None:
        self.name, self.samples = name, samples

    def model(self) -> nn.Module:
        model = MODELS[self.name][0]()
        # Biases, scales and tables begin as constants, where a part of them would not be told from another.
        with torch.no_grad():
            for parameter in model.parameters():
                if bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def train_set(self) -> samestep.Samples:
        return [MODELS[self.name][1](index) for index in range(self.samples)]

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        inputs = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        return samestep.Batch(inputs, torch.zeros(len(samples)))

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        first = next(each for each in output.values() if isinstance(each, Tensor) and each.is_floating_point())
        weights = torch.arange(first[0].numel(), dtype=first.dtype).cos().view(first[0].shape)
        return ((first * weights).square() + first * weights).sum() / first[0].numel() ** 0.5, len(first)
