"""Models of sequences as people write them: recurrences, attention of their own, experts, states, speech."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_table.entry import Entry, Row, numbers, stacked, words

WORDS, WIDTH = 31, 20


def _cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Of each token's class. [batch, tokens, classes], [batch, tokens] with -100 where nothing counts"""
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, int((target != -100).sum())


class Tagger(nn.Module):
    """A bidirectional LSTM of two layers, and another one of one direction behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 11, num_layers=2, bidirectional=True, batch_first=True)
        self.second = nn.LSTM(22, 13, batch_first=True)
        self.head = nn.Linear(13, 5)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(text))
        hidden, _ = self.second(hidden)
        return self.head(hidden)


def _tagged(index: int) -> Row:
    text = words(index, 9, WORDS)
    return {"text": text, "target": text % 5}


class Translator(nn.Module):
    """A GRU that reads, and one that writes, with attention over what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, 18, batch_first=True)
        self.decoder = nn.GRU(WIDTH, 18, batch_first=True)
        self.mix = nn.Linear(36, 22)
        self.head = nn.Linear(22, WORDS)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        read, state = self.encoder(self.embed(source))
        written, _ = self.decoder(self.goal(goal), state)
        scores = written @ read.transpose(1, 2) / 18**0.5  # [batch, written, read]
        seen = scores.softmax(-1) @ read
        return self.head(torch.tanh(self.mix(torch.cat([written, seen], -1))))

    def embed(self, source: Tensor) -> Tensor:
        return self.source(source)


def _translated(index: int) -> Row:
    goal = words(index + 50, 8, WORDS)
    return {"source": words(index, 11, WORDS), "goal": goal[:-1], "target": goal[1:]}


class Seq2Seq(nn.Module):
    """PyTorch's nn.Transformer with a causal mask and masks of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 34, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(goal.shape[1]).to(self.places.dtype)
        hidden = self.transformer(
            self.embed(source) + self.places[: source.shape[1]],
            self.embed(goal) + self.places[: goal.shape[1]],
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.head(hidden)


def _with_padding(index: int) -> Row:
    found = dict(_translated(index))
    source, length = found["source"].clone(), 6 + index % 6
    source[length:] = 0
    return {**found, "source": source}


class Experts(nn.Module):
    """Each token goes to its two best experts, chosen by a boolean mask and added back by index."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 26), nn.GELU(), nn.Linear(26, WIDTH)) for _ in range(experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])  # [tokens, width]
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)  # [tokens, 2]
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return output.view_as(hidden)


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.experts = nn.LayerNorm(WIDTH), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.experts(self.second(hidden))


class Attention(nn.Module):
    """Causal attention with one matrix for queries, keys and values."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Recurrence(nn.Module):
    """A gated linear recurrence, h_t = a_t * h_{t-1} + (1 - a_t) * x_t, with a causal convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.enter = nn.Linear(WIDTH, 2 * 26)
        self.conv = nn.Conv1d(26, 26, 3, padding=2, groups=26)
        self.gate = nn.Linear(26, 26)
        self.leave = nn.Linear(26, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.enter(self.norm(hidden)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2))
        decay = torch.sigmoid(self.gate(x))
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + (1 - decay[:, step]) * x[:, step]
            states.append(state)
        return hidden + self.leave(torch.stack(states, 1) * F.silu(z))


class Language(nn.Module):
    """An embedding, four blocks, a norm and an output layer."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.embed(text)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def experts() -> nn.Module:
    return Language(ExpertBlock)


def recurrence() -> nn.Module:
    return Language(Recurrence)


def _next(index: int) -> Row:
    text = words(index, 12, WORDS)
    return {"text": text[:-1], "target": text[1:]}


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a convolution over time, half a feed-forward (Gulati et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self._feed(), self._feed()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.before = nn.LayerNorm(WIDTH)
        self.wide = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.group, self.narrow = nn.GroupNorm(4, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.end = nn.LayerNorm(WIDTH)

    def _feed(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 34), nn.SiLU(), nn.Linear(34, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + 0.5 * self.first(hidden)
        x = self.norm(hidden)
        hidden = hidden + self.attention(x, x, x, need_weights=False)[0]
        x = F.glu(self.wide(self.before(hidden).transpose(1, 2)), 1)
        hidden = hidden + self.narrow(F.silu(self.group(self.depth(x)))).transpose(1, 2)
        return self.end(hidden + 0.5 * self.last(hidden))


class Speech(nn.Module):
    """A convolution that halves the frames, four Conformer blocks, and CTC over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(7, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConformerBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, frames: Tensor) -> Tensor:
        hidden = F.silu(self.conv(frames)).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).log_softmax(-1)


def _spoken(index: int) -> Row:
    return {"frames": numbers(index, 7, 22), "target": words(index, 4, 9)}


def _ctc(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    batch, frames = output.shape[:2]
    lengths = torch.full((batch,), frames), torch.full((batch,), target.shape[1])
    return F.ctc_loss(output.transpose(0, 1), target, *lengths, reduction="sum"), batch


def entries() -> list[Entry]:
    whole: dict[str, Any] = {"collate": stacked, "loss": _cross_entropy}
    return [
        Entry(
            name="lstm-tagger",
            kind="recurrence",
            model=Tagger,
            row=_tagged,
            stages=4,
            impossible={"tokens": "a recurrence computes no token by itself between sliced layers"},
            **whole,
        ),
        Entry(
            name="gru-seq2seq",
            kind="recurrence",
            model=Translator,
            row=_translated,
            impossible={"tokens": "a recurrence computes no token by itself between sliced layers"},
            **whole,
        ),
        Entry(name="nn-transformer", kind="encoder-decoder", model=Seq2Seq, row=_with_padding, **whole),
        Entry(name="own-experts", kind="mixture of experts", model=experts, row=_next, **whole),
        Entry(name="own-recurrence", kind="state space", model=recurrence, row=_next, **whole),
        Entry(name="conformer", kind="speech", model=Speech, row=_spoken, collate=stacked, loss=_ctc),
    ]
