"""Activations of a step whose output layer and cross-entropy take all tokens at once, or some (`run.loss_chunk`).

    python benchmarks/loss_chunk.py [--chunks 64 16] [--docs]

The model is a tiny Llama with a vocabulary of 16,384 words, on 32 random texts of 12 tokens, in one process. Its
activations are counted in the third step (see `samestep.training.usage`); of 384 tokens the logits alone are 25 MB.
`--docs` writes the table of docs/memory.md and docs/zh/memory.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import torch
from page_parts import MeasuredTable, markdown_table
from torch import Tensor, nn

import samestep

VOCABULARY, TEXTS, TOKENS = 16_384, 32, 12


class Words(samestep.Task):
    """The next token of random texts, by a decoder of two small layers."""

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 21,
        }
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))

    def train_set(self) -> samestep.Samples:
        return list(torch.randint(VOCABULARY, (TEXTS, TOKENS + 1), generator=torch.Generator().manual_seed(0)))

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        ids = torch.stack(list(samples))
        return samestep.Batch({"input_ids": ids[:, :-1]}, ids[:, 1:])

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        logits = output.logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum"), len(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 16], help="tokens at a time")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    rows = measured(options.chunks)
    print(markdown(rows, "en"))
    if options.docs:
        TABLE.keep(rows)


def measured(chunks: Sequence[int]) -> list[dict[str, int | None]]:
    """Bytes of activations with the whole logits, and with each chunk."""
    recipe = samestep.Recipe(task=Words(), batch=TEXTS, steps=3)
    return [
        {"chunk": chunk, "activations": samestep.dry_run(recipe, loss_chunk=chunk, threads=1)[0].activations}
        for chunk in (None, *chunks)
    ]


def markdown(rows: Sequence[Mapping[str, int | None]], language: str) -> str:
    title, peak, whole = WORDS[language]
    names = (f"`loss_chunk: {row['chunk']}`" if row["chunk"] else whole for row in rows)
    bytes_ = (row["activations"] or 0 for row in rows)
    return markdown_table(
        [title, peak], [[name, f"{each / 1e6:.1f} MB"] for name, each in zip(names, bytes_, strict=True)], align="l"
    )


WORDS = {
    "en": ("a tiny Llama, 384 tokens x 16,384 words, one process", "peak activations", "logits whole"),
    "zh": ("很小的 Llama，384 个 token × 16,384 个词，单进程", "激活的峰值", "完整的 logits"),
}
TABLE = MeasuredTable(name="loss-chunk", part="benchmarks/loss_chunk.py", page="docs/memory.md", text=markdown)


if __name__ == "__main__":
    main()
