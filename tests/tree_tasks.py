"""Models whose later layers take more than a hidden state: skip connections, an encoder's output, states, towers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from handed_models import classes, handed, reversed_words, texts
from small_tasks import Points
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import samestep

WORDS = 23


class _Pictures(Points):
    """Pictures of 8 x 8, each of one class."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(samples=60, held_out=20, dropout=dropout)

    def _pictures(self, pairs: Sequence[Any], seed: int) -> samestep.Samples:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(2, 8, 8, generator=generator) + label, label) for _, label in pairs]

    def train_set(self) -> samestep.Samples:
        return self._pictures(self.pairs, 5)

    def eval_set(self) -> samestep.Samples:
        return self._pictures(self.held_out, 6)


class _Down(nn.Module):
    def __init__(self, wide: int, out: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)
        self.drop = nn.Dropout2d(dropout)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.drop(F.relu(self.norm(self.conv(pixels)), inplace=True)) * 0.9


class _UNet(nn.Module):
    """What goes down is kept for the way up, and written to in place on the way."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.first = _Down(2, 4, dropout)
        self.second = _Down(4, 6, dropout)
        self.middle = _Down(6, 8, dropout)
        self.third = _Down(8 + 6, 6, dropout)
        self.fourth = _Down(6 + 4, 4, dropout)
        self.head = nn.Linear(4, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        wide = self.first(pixels)
        wide += 0.1
        half = self.second(F.max_pool2d(wide, 2))
        quarter = self.middle(F.max_pool2d(half, 2))
        up = self.third(torch.cat([F.interpolate(quarter, scale_factor=2), half], 1))
        up = self.fourth(torch.cat([F.interpolate(up, scale_factor=2), wide], 1))
        return self.head(up.mean((2, 3)))


class UNet(_Pictures):
    def model(self) -> nn.Module:
        return _UNet(self.classes, self.dropout)


class _Tagger(nn.Module):
    """Two recurrent layers; the second begins with the first one's states, and the head takes both."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.first = nn.LSTM(8, 8, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.merge = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        low, states = self.first(self.words(words))
        high, states = self.second(F.dropout(low, 0.1, self.training), states)
        merged, last = self.merge(torch.cat([low, high], -1) * mask[..., None])
        return self.head(torch.cat([merged.sum(1), last[0] + states[0][0]], -1))  # [samples, classes]


class Tagger(Points):
    """Sentences of 3 to 7 words, with the mask of their words."""

    def __init__(self) -> None:
        super().__init__(samples=60, held_out=20)
        generator = torch.Generator().manual_seed(2)
        self.sentences = [
            (torch.randint(1, WORDS, (int(3 + label * 2),), generator=generator), label) for _, label in self.pairs
        ]

    def train_set(self) -> samestep.Samples:
        return self.sentences

    def eval_set(self) -> samestep.Samples:
        return self.sentences[:20]

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        # All are made 7 long, since the states after the last word depend on the padding.
        words = torch.stack([F.pad(words, (0, 7 - len(words))) for words, _ in samples])
        labels = torch.stack([label for _, label in samples])
        return samestep.Batch({"words": words, "mask": (words != 0).float()}, labels)

    def model(self) -> nn.Module:
        return _Tagger(self.classes)


@dataclass
class _Views:
    """What a tower gives: an object of the model's own class."""

    pooled: Tensor
    counted: Tensor | None
    name: str


class _Tower(nn.Module):
    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(layers)])
        self.last = weight_norm(nn.Linear(wide, 5))

    def forward(self, points: Tensor) -> _Views:
        for layer in self.layers:
            points = layer(points)
        return _Views(pooled=self.last(points), counted=(points > 0).sum(-1), name="tower")


class _Towers(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left = _Tower(4, 2)
        self.right = _Tower(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.join = nn.Sequential(nn.Linear(11, 8), nn.ReLU(inplace=True), nn.Linear(8, classes))

    def forward(self, points: Tensor) -> Tensor:
        left, right = self.left(points), self.right(points.flip(-1))
        assert left.name == "tower"
        counted = left.counted if left.counted is not None else points.new_zeros(len(points))
        both = torch.cat([left.pooled * self.scale, right.pooled, counted[:, None].to(points.dtype)], -1)
        return self.join(both)


class Towers(Points):
    def __init__(self) -> None:
        super().__init__(samples=60, held_out=20)

    def model(self) -> nn.Module:
        return _Towers(self.classes)


class _Translator(nn.Module):
    """PyTorch's own transformer with all of its masks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.transformer = nn.Transformer(12, 2, 2, 2, 20, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, classes)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        embedded, padding = self.words(words), mask == 0
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=embedded.dtype)
        given = self.transformer(
            embedded,
            embedded.flip(1),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(given.mean(1))


class Translator(Tagger):
    def model(self) -> nn.Module:
        return _Translator(self.classes)


class _Twice(nn.Module):
    """One encoder for both halves of a point."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout)) for _ in range(2)])
        self.head = nn.Linear(8, classes)

    def encode(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = points + layer(points)
        return points

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.cat([self.encode(points), self.encode(-points * 2)], -1))


class Twice(Points):
    def __init__(self) -> None:
        super().__init__(samples=60, held_out=20, dropout=0.2)

    def model(self) -> nn.Module:
        return _Twice(self.classes, self.dropout)


class _Tied(nn.Module):
    """The first and the third layer share a weight."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.layers[2][0].weight = self.layers[0][0].weight  # pyright: ignore
        self.head = nn.Linear(4, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.layers(points))


class Tied(Points):
    def __init__(self) -> None:
        super().__init__(samples=60, held_out=20)

    def model(self) -> nn.Module:
        return _Tied(self.classes)


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    sizes["decoder_start_token_id"] = 0
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, vocab_size=40, dropout_rate=0.1))


_SEQUENCES: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
}


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_SEQUENCES, max_position_embeddings=24)
    )


def marian() -> nn.Module:
    return transformers.MarianMTModel(transformers.MarianConfig(**_SEQUENCES, max_position_embeddings=24))


def whisper() -> nn.Module:
    sizes = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 12, "suppress_tokens": None}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**_SEQUENCES, **sizes, begin_suppress_tokens=None)
    )


def spoken(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Sounds of 16 steps, [rows, bands, steps], and the words as labels."""
    labels = reversed_words(rows)["labels"]
    steps = torch.arange(4 * 16.0).view(4, 16)
    sounds = torch.stack([torch.sin(steps * (1 + row["input_ids"][0] / 40)) for row in rows])
    return {"input_features": sounds, "labels": labels}


def t5_task() -> Any:
    return handed(t5, texts(), reversed_words)


def bart_task() -> Any:
    return handed(bart, texts(), reversed_words)


def marian_task() -> Any:
    return handed(marian, texts(), reversed_words)


def whisper_task() -> Any:
    return handed(whisper, texts(), spoken)


class Parametrized(Points):
    """Layers whose weights are computed from others before each use."""

    def __init__(self, *, spectral: bool = False) -> None:
        super().__init__(samples=60, held_out=20)
        self.norm = spectral_norm if spectral else weight_norm

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(self.norm(nn.Linear(4, 6)), nn.Tanh()),
            nn.Sequential(orthogonal(nn.Linear(6, 6)), nn.Tanh()),
            nn.Sequential(self.norm(nn.Linear(6, 6)), nn.Tanh()),
            nn.Sequential(orthogonal(nn.Linear(6, 6)), nn.Linear(6, self.classes)),
        )


def albert() -> nn.Module:
    """All layers are one module, called again and again."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_labels": 3}
    return transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(
            **sizes, vocab_size=40, intermediate_size=20, embedding_size=8, hidden_dropout_prob=0.1
        )
    )


def albert_task() -> Any:
    return handed(albert, texts(), classes)


class Dropping(Points):
    """Layers that are left out by chance."""

    def model(self) -> nn.Module:
        return _Dropping(self.classes)


class _Dropping(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(4, classes)

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.5:
                points = points + layer(points)
        return self.head(points)
