"""Every layout on every kind of model, each held against one process in float64: the tables of docs/matrix.md.

    python benchmarks/matrix.py [--layouts all] [--json FILE] [--docs]

The jobs are the small ones of examples/proof, and five models of transformers that samestep was not made for, of
tiny random configurations; and for a table of their own, with layouts of their own, mixtures of experts. `--docs`
writes the tables whose jobs were all run, and the reasons of what is refused, into docs/matrix.md and
docs/zh/matrix.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, write_parts
from rich.console import Console
from rich.progress import Progress

import samestep
from samestep import jobfile
from samestep.api import verify_layouts
from samestep.display.tables import print_matrix
from samestep.job import Job, Run
from samestep.matrix import Row, layouts_of

ROOT = Path(__file__).parent.parent
SHIPPED = ("text", "language", "images", "regression")
UNTUNED = ("qwen2", "mistral", "gpt2", "t5", "vit")
MIXTURES = ("mixtral", "qwen2-moe", "olmoe", "deepseek-v3", "gpt-oss", "list", "dictionary", "stack")
REFUSED = {"en": "refused", "zh": "拒绝"}
ALL = [*SHIPPED, *UNTUNED, *MIXTURES]
PAGES = {"en": ROOT / "docs" / "matrix.md", "zh": ROOT / "docs" / "zh" / "matrix.md"}


def jobs() -> list[Job]:
    shipped = [jobfile.load(ROOT / "examples" / "proof" / f"{name}.yaml").job for name in SHIPPED]
    return shipped + [untuned(name) for name in (*UNTUNED, *MIXTURES)]


def untuned(name: str) -> Job:
    """A model of transformers on random data, in batches that the ranks don't divide."""
    task = f"{ROOT / 'tests' / 'tiny_models.py'}:Tiny"
    if name in MIXTURES:
        task = f"{ROOT / 'tests' / 'expert_models.py'}:Words"
    optimizer = samestep.AdamW(lr=1e-3)
    recipe = samestep.Recipe(task=task, args={"name": name}, batch=10, epochs=1, clip=0.5, optimizer=optimizer)
    return Job(recipe=recipe, run=Run(), name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="all")
    parser.add_argument("--jobs", nargs="*", choices=ALL, default=ALL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    chosen = [job for job in jobs() if job.name in options.jobs]
    layouts = layouts_of(options.layouts)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("jobs", total=len(chosen))
        for job in chosen:
            progress.update(bar, description=str(job.name))
            rows += verify_layouts(job, layouts_of("experts") if job.name in MIXTURES else layouts)
            progress.advance(bar)
    print_matrix(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n", encoding="utf-8")
    if options.docs:
        for language, page in PAGES.items():
            for first, names in ((1, (*SHIPPED, *UNTUNED)), (3, MIXTURES)):
                own = [row for row in rows if row.job in names]
                if {row.job for row in own} == set(names):
                    parts = (table(own, REFUSED[language]), reasons(own))
                    write_parts(page, {f"part {number}": part for number, part in enumerate(parts, first)})


def table(rows: Sequence[Row], refused: str) -> str:
    """A line a layout, a column a job: the largest relative difference of all that is compared."""
    names = list(dict.fromkeys(row.job for row in rows))
    numbers = {reason: number for number, reason in enumerate(_reasons(rows), 1)}
    lines: list[list[str]] = []
    for layout in dict.fromkeys(row.layout for row in rows):
        cells = {row.job: _cell(row, numbers, refused) for row in rows if row.layout == layout}
        lines.append([f"`{layout}`", *(cells[name] for name in names)])
    return markdown_table(["", *names], lines)


def _cell(row: Row, numbers: dict[str, int], refused: str) -> str:
    if row.proof is not None:
        largest = f"{max(row.proof.max_relative_difference.values()):.0e}"
        return largest if row.proof.same_step else f"**{largest}**"
    return f"{refused} {numbers[_reason(row)]}" if row.reason else "**failed**"


def reasons(rows: Sequence[Row]) -> str:
    return "\n".join(f"{number}. {reason}" for number, reason in enumerate(_reasons(rows), 1))


def _reasons(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(_reason(row) for row in rows if row.reason))


def _reason(row: Row) -> str:
    """Why a layout was refused, without the layout's own name, which differs from line to line."""
    return re.sub(r'^layout "[^"]*": ', "", row.reason or "")


if __name__ == "__main__":
    main()
