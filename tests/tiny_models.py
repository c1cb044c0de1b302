"""Tiny models of many kinds on random data, for tests of layouts that cut the model itself; odd sizes on purpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

import samestep

VOCABULARY = 56
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16}


class Encoder(nn.Module):
    """PyTorch's own encoder between an embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.1, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0))


def _causal(config: type, **values: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config(**{**DECODER, **values}))


def _bert() -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 40, "max_position_embeddings": 16, "num_labels": 3}
    return transformers.AutoModelForSequenceClassification.from_config(transformers.BertConfig(**sizes))


def _distilbert() -> nn.Module:
    sizes: dict[str, Any] = {"dim": 24, "n_layers": 4, "n_heads": 4, "hidden_dim": 40, "num_labels": 3}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    return transformers.AutoModelForSequenceClassification.from_config(transformers.DistilBertConfig(**sizes))


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**sizes))


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return transformers.AutoModelForSeq2SeqLM.from_config(transformers.T5Config(**sizes))


def _umt5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return transformers.AutoModelForSeq2SeqLM.from_config(transformers.UMT5Config(**sizes))


def _gpt_oss() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _causal(transformers.GptOssConfig, head_dim=6, num_hidden_layers=2, **experts)


def _jamba() -> nn.Module:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 8, "expert_layer_offset": 7}
    state = {"mamba_d_state": 4, "mamba_dt_rank": 3}
    return _causal(transformers.JambaConfig, num_experts=2, num_experts_per_tok=1, **layers, **state)


def _vit() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 40, "image_size": 8, "patch_size": 4, "num_labels": 3}
    return transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig(**sizes))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 31), nn.ReLU(), nn.Linear(31, 1)
    )


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "llama": lambda: _causal(transformers.LlamaConfig),
    "llama-tied": lambda: _causal(transformers.LlamaConfig, tie_word_embeddings=True),
    "qwen2": lambda: _causal(transformers.Qwen2Config),
    "qwen3": lambda: _causal(transformers.Qwen3Config, head_dim=6),
    "mistral": lambda: _causal(transformers.MistralConfig, sliding_window=4),
    "t5": _t5,
    "umt5": _umt5,
    "gpt-oss": _gpt_oss,
    "jamba": _jamba,
    "vit": _vit,
    "encoder": Encoder,
    "mlp": _mlp,
}
CLASSIFIERS = ("bert", "distilbert", "vit")


class Tiny(samestep.Task):
    """A tiny model that learns random targets: classes of texts or images, the next word, or a number."""

    def __init__(self, *, name: str, samples: int = 45) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 12, (samples,), generator=generator).tolist()
        self.name = name
        self.texts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)
        self.points = torch.randn(samples, 20, generator=generator)
        self.labels = torch.randint(3, (samples,), generator=generator)

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def train_set(self) -> samestep.Samples:
        return range(len(self.texts))

    def eval_set(self) -> samestep.Samples | None:
        return range(10)

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        chosen = list(samples)
        if self.name == "vit":
            return samestep.Batch({"pixel_values": self.images[chosen]}, self.labels[chosen])
        if self.name == "mlp":
            return samestep.Batch(self.points[chosen], self.labels[chosen, None].float())
        ids = nn.utils.rnn.pad_sequence([self.texts[i] for i in chosen], batch_first=True)  # [samples, tokens]
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        if self.name in ("t5", "umt5"):
            inputs["decoder_input_ids"] = ids
        if self.name in CLASSIFIERS:
            return samestep.Batch(inputs, self.labels[chosen])
        return samestep.Batch(inputs, ids.masked_fill(ids == 0, -100))

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        logits = getattr(output, "logits", output)
        if self.name == "mlp":
            return (logits - batch.targets).square().sum(), len(logits)
        if self.name in CLASSIFIERS:
            return nn.functional.cross_entropy(logits, batch.targets, reduction="sum"), len(logits)
        words = batch.targets[:, 1:].reshape(-1)
        logits = logits[:, :-1].reshape(-1, VOCABULARY)
        return nn.functional.cross_entropy(logits, words, reduction="sum"), (words != -100).sum()

    def metrics(self) -> Mapping[str, Metric]:
        return {"loss": MeanMetric().set_dtype(torch.float64)}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        loss, count = self.loss(output, batch)
        return loss.reshape(1) / count, torch.ones(1)
