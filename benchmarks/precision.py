"""Compares bf16 with float32 on this machine: the same training, one step of each in turns, in one process.

    python benchmarks/precision.py [--steps 20] [--layers 4] [--hidden 512] [--json FILE]

Two trainings of one encoder on random texts of 128 tokens, 16 per step, with AdamW. The results are the median steps,
after the first three.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import samestep
from samestep.job import Job
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.training.fit import Training

VOCABULARY, TOKENS, CLASSES = 1000, 128, 4
SETTLE = 3  # steps until memory is allocated


class Texts(samestep.Task):
    """Random texts in random classes, since only the step is timed."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        self.layers, self.hidden = layers, hidden
        generator = torch.Generator().manual_seed(0)
        self.texts = torch.randint(VOCABULARY, (256, TOKENS), generator=generator)
        self.labels = torch.randint(CLASSES, (256,), generator=generator)

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": self.hidden, "num_hidden_layers": self.layers}
        sizes |= {"num_attention_heads": self.hidden // 64, "intermediate_size": 4 * self.hidden}
        sizes |= {"vocab_size": VOCABULARY, "num_labels": CLASSES}
        return BertForSequenceClassification(BertConfig(**sizes))

    def train_set(self) -> samestep.Samples:
        return range(len(self.texts))

    def collate(self, samples: Sequence[int]) -> samestep.Batch:
        chosen = list(samples)
        return samestep.Batch({"input_ids": self.texts[chosen]}, self.labels[chosen])

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output.logits.float(), batch.targets, reduction="sum"), len(batch.targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    task = Texts(layers=options.layers, hidden=options.hidden)
    seconds = take_turns(task, options.steps)
    medians = {name: statistics.median(values[SETTLE:]) for name, values in seconds.items()}
    table = Table(title=f"a step of {options.layers} layers of {options.hidden}, {options.steps} steps in turns")
    for name in (*medians, "float32 / bf16"):
        table.add_column(name, justify="right")
    ratio = medians["fp32"] / medians["bf16"]
    table.add_row(*(f"{1e3 * median:.0f} ms" for median in medians.values()), f"{ratio:.2f}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": seconds, "ratio": ratio}) + "\n", encoding="utf-8")


def take_turns(task: samestep.Task, steps: int) -> dict[str, list[float]]:
    with join() as world:
        runs = {}
        for precision in ("fp32", "bf16"):
            recipe = samestep.Recipe(task=task, batch=16, steps=steps, precision=precision, dropout=False)
            runs[precision] = Training(Job(recipe=recipe), task, world, Layout()).steps()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for step in range(steps):
            # The second one may find warmer caches, so the order alternates.
            for name in sorted(runs, reverse=step % 2 == 1):
                began = time.perf_counter()
                next(runs[name])
                seconds[name].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
