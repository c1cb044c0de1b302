"""Tiny models of many kinds on random numbers, as tasks: for layouts that cut the model itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import samestep

VOCABULARY = 57  # of no even number of rows


def tokens(config: str, **values: Any) -> Any:
    """The configuration of a transformers model with a tiny vocabulary; the name is that of its class."""
    import transformers

    return getattr(transformers, config)(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **values)


def bert(**values: Any) -> nn.Module:
    from transformers import BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 21}
    return BertForSequenceClassification(
        tokens("BertConfig", max_position_embeddings=16, num_labels=3, **{**sizes, **values})
    )


def gpt2() -> nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(tokens("GPT2Config", n_embd=16, n_layer=2, n_head=4, n_positions=16))


def bloom() -> nn.Module:
    from transformers import BloomForCausalLM

    return BloomForCausalLM(tokens("BloomConfig", hidden_size=16, n_layer=2, n_head=4))


def llama(**values: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 21}
    settings = {"num_key_value_heads": 2, "max_position_embeddings": 16, "attention_bias": True, "mlp_bias": True}
    return LlamaForCausalLM(tokens("LlamaConfig", **{**sizes, **settings, **values}))


class Encoder(nn.Module):
    """PyTorch's own transformer over token ids, with a class for each text."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 21, batch_first=batch_first)
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)  # [batch, tokens, 16]
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.head(x.mean(1 if self.batch_first else 0))


class Decoder(nn.Module):
    """PyTorch's own decoder: attention to itself under a causal mask, and to other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerDecoderLayer(16, 4, 21, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        memory = self.embedding(input_ids.flip(1))  # [batch, tokens, 16]
        causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=memory.dtype)
        x = self.decoder(self.embedding(input_ids), memory, tgt_mask=causal, tgt_is_causal=True)
        return self.head(x)  # [batch, tokens, vocabulary]


class Averaged(nn.Module):
    """An attention whose weights are an output too, after a frozen table, beside a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.embedding.weight.requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 4, kdim=16, vdim=16)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(0, 1)  # [tokens, batch, 16]
        attended, weights = self.attention(x, x, x, key_padding_mask=attention_mask == 0)
        return self.head(attended.mean(0)) * weights.square().sum((1, 2))[:, None]


class Weighing(nn.Module):
    """A block whose attention is asked for its weights, which it then lays aside."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.after = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed, mask = self.norm(x), None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.attention(normed, normed, normed, attn_mask=mask)[0]
        return x + self.after(x).relu()


class WeighingBlocks(nn.Module):
    """Two such blocks. With a causal mask, which a block makes itself, tokens can't be split in its attention."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Weighing(causal) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)  # [batch, tokens, 16]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # [batch, tokens, vocabulary]


class Texts(samestep.Task):
    """Random token ids; one of three classes for each text, or the next token after each."""

    def __init__(self, make: Callable[[], nn.Module], *, causal: bool = False, samples: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, VOCABULARY, (samples, 9), generator=generator)  # [samples, tokens]
        self.lengths = torch.randint(4, 10, (samples,), generator=generator)
        self.classes = torch.randint(3, (samples,), generator=generator)
        self.make, self.causal = make, causal

    def model(self) -> nn.Module:
        model = self.make()
        # Biases begin at zero, where a bias that is added twice would not be seen.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def train_set(self) -> samestep.Samples:
        return list(zip(self.ids, self.lengths, self.classes, strict=True))

    def collate(self, samples: Any) -> samestep.Batch:
        ids, lengths, classes = (torch.stack(column) for column in zip(*samples, strict=True))
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # [batch, tokens]
        inputs = {"input_ids": ids, "attention_mask": mask}
        return samestep.Batch(inputs, ids.masked_fill(mask == 0, -100) if self.causal else classes)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        logits = getattr(output, "logits", output)
        if not self.causal:
            return nn.functional.cross_entropy(logits, batch.targets, reduction="sum"), len(batch.targets)
        following = batch.targets[:, 1:]  # [batch, tokens - 1]
        predicted = logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(predicted, following.flatten(), reduction="sum"), (following >= 0).sum()
