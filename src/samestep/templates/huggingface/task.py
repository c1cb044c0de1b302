"""A model of transformers, its rows and its collator, as a task that job.yaml names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from samestep import UserError
from samestep.tasks import HuggingFace

PADDING, END, FIRST_BYTE = 0, 1, 2
IGNORED = -100  # a label that the model's loss leaves out

Row = Mapping[str, list[int]]


def build() -> PreTrainedModel:
    """Build the model; any model of transformers that returns a loss fits, and any model with `loss=` (see below).

    For pretrained weights: `AutoModelForSeq2SeqLM.from_pretrained("path/to/folder")`, and its tokenizer in `ids_of`.
    """
    config = T5Config(
        vocab_size=FIRST_BYTE + 256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    config.decoder_start_token_id = PADDING
    return T5ForConditionalGeneration(config)


def ids_of(text: str) -> list[int]:
    """A text's tokens: its UTF-8 bytes, and an end. `AutoTokenizer` belongs here with a pretrained model."""
    return [FIRST_BYTE + byte for byte in text.encode()] + [END]


def read(file: Path) -> list[Row]:
    """Load the rows: one JSON object a line, with `source` and `target`."""
    if not file.is_file():
        raise UserError(f"args: file is {file}, which is not there; python make_data.py makes sample data")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{"input_ids": ids_of(row["source"]), "labels": ids_of(row["target"])} for row in rows]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows of one batch as tensors of shape (rows, longest)."""
    inputs = _padded([row["input_ids"] for row in rows], PADDING)
    return {
        "input_ids": inputs,
        "attention_mask": (inputs != PADDING).long(),
        "labels": _padded([row["labels"] for row in rows], IGNORED),
    }


def _padded(sequences: Sequence[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True, padding_value=value)


class TextToText(HuggingFace):
    """From a text to a text. The arguments come from `args:` in job.yaml; `file` lies next to this file.

    For a loss of your own: `super().__init__(..., loss=mine)`, where `mine(output, batch)` returns a sum and a count.
    """

    def __init__(self, *, file: str, held_out: float = 0.1) -> None:
        rows = read(Path(__file__).parent / file)
        kept = round(len(rows) * held_out)
        super().__init__(model=build, data=rows[kept:], eval_data=rows[:kept] or None, collator=collate)
