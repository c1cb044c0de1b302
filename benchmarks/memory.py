"""Memory and traffic of a rank under each kind of data parallelism: measured, compared with the formulas.

    python benchmarks/memory.py [--ranks 1 2 4 8] [--json FILE] [--docs]

The model has 64 square layers of width 128 (1,048,576 parameters, no biases; 8 ranks divide each layer evenly), with
Adam, so that rounding and small tensors don't blur the figures. A rank takes three steps, of which the third is
measured (see `samestep.training.usage`); the figure is that of the rank with the most. For the comparison with the
ZeRO paper, which does not count the layer being computed, the model has 256 layers of width 64, with as many
parameters, and one rank of N is rehearsed (see `samestep.training.rehearsal`). `--docs` writes the tables into
docs/memory.md and docs/zh/memory.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import torch
from page_parts import markdown_table, write_parts
from rich.console import Console
from torch import Tensor, nn

import samestep
from samestep import api
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.training.fit import try_out
from samestep.training.usage import Usage

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS, WIDTH = 64, 128
BLOCKS_BESIDE_PAPER, WIDTH_BESIDE_PAPER = 256, 64
PARAMETERS = BLOCKS * WIDTH * WIDTH
assert PARAMETERS == BLOCKS_BESIDE_PAPER * WIDTH_BESIDE_PAPER**2

# Kind of data parallelism -> its layout for n ranks.
LAYOUTS: Mapping[str, Callable[[int], str]] = {
    "dpN": lambda n: f"dp{n}",
    "zero1xN": lambda n: f"zero1x{n}",
    "zero2xN": lambda n: f"zero2x{n}",
    "fsdpN": lambda n: f"fsdp{n}",
}
MASTER = "bf16, master weights"
PRECISIONS = ("fp32", "bf16")


class Formula:
    """A formula in N, the number of ranks: its text, and its value."""

    def __init__(self, text: str, value: Callable[[int], float]) -> None:
        self.text = text
        self.value = value


# Bytes per parameter that a rank keeps between steps: float32 parameters (4), gradients (4), Adam's averages (8).
# With bf16 they are the same: autocast and FSDP2 both keep float32, and make bf16 copies to compute with.
KEPT = {
    "dpN": Formula("16", lambda n: 16),
    "zero1xN": Formula("8 + 8/N", lambda n: 8 + 8 / n),
    "zero2xN": Formula("16/N", lambda n: 16 / n),
    "fsdpN": Formula("16/N", lambda n: 16 / n),
}

# Bytes per parameter gathered at the peak. zero2xN: all parameters, from forward to backward, and the messages of two
# blocks of L. fsdpN: the block being computed, its message, which FSDP2 keeps until the next block's is copied out,
# and that next message.
GATHERED = {
    ("zero2xN", "fp32"): Formula("4 + 8/L", lambda n: 4 + 8 / BLOCKS),
    ("fsdpN", "fp32"): Formula("12/L", lambda n: 12 / BLOCKS),
    ("zero2xN", "bf16"): Formula("2 + 4/L", lambda n: 2 + 4 / BLOCKS),
    ("fsdpN", "bf16"): Formula("6/L", lambda n: 6 / BLOCKS),
}

# Figures of Rajbhandari et al. 2020 (section 3, table 1) for bf16 parameters and gradients with a float32 copy.
PAPER = {
    "dpN": Formula("16", lambda n: 16),
    "zero1xN": Formula("4 + 12/N", lambda n: 4 + 12 / n),
    "zero2xN": Formula("2 + 14/N", lambda n: 2 + 14 / n),
    "fsdpN": Formula("16/N", lambda n: 16 / n),
}


# Bytes per parameter that a rank sends in a step. An all-gather or a reduce-scatter of b bytes per parameter sends
# b(N-1)/N, an all-reduce twice that (Thakur et al. 2005, section 4).
def _sent(text: str, bytes_in_all: float) -> Formula:
    return Formula(f"{text} × (N-1)/N", lambda n: bytes_in_all * (n - 1) / n)


SENT = {
    ("dpN", "fp32"): _sent("8", 8),
    ("zero1xN", "fp32"): _sent("8", 8),
    ("zero2xN", "fp32"): _sent("8", 8),
    ("fsdpN", "fp32"): _sent("12", 12),
    ("dpN", "bf16"): _sent("8", 8),
    ("zero1xN", "bf16"): _sent("8", 8),
    ("zero2xN", "bf16"): _sent("6", 6),
    ("fsdpN", "bf16"): _sent("8", 8),
}


class Stack(samestep.Task):
    """Square layers that learn to reproduce random vectors."""

    def __init__(self, blocks: int, width: int) -> None:
        self.blocks = blocks
        self.width = width

    def model(self) -> nn.Module:
        layers = (nn.Linear(self.width, self.width, bias=False) for _ in range(self.blocks))
        return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(64, self.width, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output.float() - batch.targets).square().sum(), len(output)


Measured = Mapping[str, float]  # bytes per parameter, each of the rank with the most


def measure(n: int) -> Mapping[tuple[str, str], Measured]:
    """Measure each kind and precision, one after the other in one start of n ranks."""
    if n > 1:
        return local.start(in_a_rank, [n], n)
    alone = {precision: in_a_rank(1, ["dpN"])["dpN", precision] for precision in PRECISIONS}
    # With one rank, all kinds are the same.
    return {(name, precision): alone[precision] for name in LAYOUTS for precision in PRECISIONS}


def in_a_rank(n: int, names: Sequence[str] = tuple(LAYOUTS)) -> Mapping[tuple[str, str], Measured]:
    with join(device="cpu", threads=1) as world:
        return {
            (name, precision): a_parameter(
                try_out(made, made.recipe.task, world, Layout.parse(LAYOUTS[name](n) if n > 1 else "single"))
            )
            for name in names
            for precision in PRECISIONS
            for made in [job(precision)]
        }


def job(precision: Any) -> samestep.Job:
    of_paper = precision == MASTER
    numbers: Any = "bf16" if of_paper else precision
    task = Stack(BLOCKS_BESIDE_PAPER, WIDTH_BESIDE_PAPER) if of_paper else Stack(BLOCKS, WIDTH)
    return samestep.Job(
        recipe=samestep.Recipe(task=task, batch=16, steps=3, precision=numbers, master_weights=of_paper)
    )


def rehearsed(n: int) -> Mapping[tuple[str, str], Measured]:
    """Rehearse one rank of n for each kind, with master weights."""
    found: dict[tuple[str, str], Measured] = {}
    for name, layout in LAYOUTS.items():
        run = samestep.Run(layout=layout(n), threads=1, check=False)
        ranks = api.rehearse_job(replace(job(MASTER), run=run), n)
        found[name, MASTER] = a_parameter([each.usage for each in ranks])
    return found


def a_parameter(ranks: Sequence[Usage]) -> Measured:
    return {
        "kept": max(rank.parameters + rank.gradients + rank.optimizer_state for rank in ranks) / PARAMETERS,
        "gathered": max(rank.gathered for rank in ranks) / PARAMETERS,
        "at once": max(r.parameters + r.optimizer_state + r.gathered_and_gradients for r in ranks) / PARAMETERS,
        "sent": max(rank.sent_in_all for rank in ranks) / PARAMETERS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    figures: dict[tuple[str, str, int], Measured] = {}
    for n in options.ranks:
        counted = {**measure(n), **(rehearsed(n) if n == max(options.ranks) else {})}
        figures |= {(name, precision, n): figure for (name, precision), figure in counted.items()}
    for language in TITLES:
        tables = all_tables(figures, options.ranks, language)
        if language == "en":
            Console().print(tables, markup=False, soft_wrap=True)
        if options.docs:
            parts = tables.split("\n\n")
            write_parts(PAGES[language], {f"table {number}": part for number, part in enumerate(parts, 1)})
    if options.json is not None:
        rows = [{"layout": name, "precision": p, "ranks": n, **row} for (name, p, n), row in figures.items()]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


PAGES = {"en": DOCS / "memory.md", "zh": DOCS / "zh" / "memory.md"}

# The tables' titles.
TITLES = {
    "en": {
        "layout": "layout",
        "precision": "precision",
        "kept": "kept, formula",
        "gathered": "gathered at the peak, formula",
        "sent": "sent, formula",
        "ranks": "N = {}",
        "at once": "kept and gathered, at N = {}",
        "paper": "the paper's, at N = {}",
        "paper formula": "the paper's formula",
        "times": "times dpN in fp32, formula",
    },
    "zh": {
        "layout": "布局",
        "precision": "精度",
        "kept": "保存，公式",
        "gathered": "峰值时收集，公式",
        "sent": "发送，公式",
        "ranks": "N = {}",
        "at once": "保存加收集，N = {}",
        "paper": "论文值，N = {}",
        "paper formula": "论文的公式",
        "times": "是 fp32 的 dpN 的几倍，公式",
    },
}


def all_tables(figures: Mapping[tuple[str, str, int], Measured], ranks: Sequence[int], language: str) -> str:
    """The tables of measured figures in a language, as Markdown."""
    words = TITLES[language]
    shared = [n for n in ranks if n > 1]
    most = max(ranks)
    kept = table(
        [words["layout"], words["kept"], *(words["ranks"].format(n) for n in ranks)],
        [[name, KEPT[name].text, *(figures[name, "fp32", n]["kept"] for n in ranks)] for name in LAYOUTS],
    )
    gathered = table(
        [words["layout"], words["precision"], words["gathered"], *(words["ranks"].format(n) for n in shared)],
        [
            [name, precision, formula.text, *(figures[name, precision, n]["gathered"] for n in shared)]
            for (name, precision), formula in GATHERED.items()
        ],
    )
    beside = table(
        [
            words["layout"],
            words["at once"].format(most),
            words["paper formula"],
            words["paper"].format(most),
        ],
        [
            [
                name,
                figures[name, MASTER, most]["at once"],
                PAPER[name].text,
                PAPER[name].value(most),
            ]
            for name in LAYOUTS
        ],
    )
    sent = table(
        [
            words["layout"],
            words["precision"],
            words["sent"],
            *(words["ranks"].format(n) for n in shared),
            words["times"],
        ],
        [
            [
                name,
                precision,
                formula.text,
                *(figures[name, precision, n]["sent"] for n in shared),
                f"{formula.value(2) / SENT['dpN', 'fp32'].value(2):g}",
            ]
            for (name, precision), formula in SENT.items()
        ],
    )
    return "\n\n".join([kept, gathered, beside, sent])


def table(titles: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """A Markdown table. Numbers have two digits after the point."""
    names = set(LAYOUTS)
    lines = [
        [f"`{cell}`" if cell in names else cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row]
        for row in rows
    ]
    return markdown_table(titles, lines, align="l")


if __name__ == "__main__":
    main()
