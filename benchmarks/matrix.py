"""Proves all layouts on all kinds of models, each compared with one process in float64: the tables of docs/matrix.md.

    python benchmarks/matrix.py [--layouts all] [--json FILE] [--docs]

The jobs are the small ones of examples/proof, and five transformers models for which samestep has no special code, in
tiny random configurations; mixtures of experts have their own table and layouts. `--docs` writes the tables whose
jobs were all run, with the reasons of refused layouts, into docs/matrix.md and docs/zh/matrix.md. With only some of
the layouts, it writes their rows and keeps the others.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, read_part, write_parts
from rich.console import Console
from rich.progress import Progress

import samestep
from samestep import jobfile
from samestep.api import verify_layouts
from samestep.display.proofs import print_matrix
from samestep.job import Job, Run
from samestep.verification.matrix import ALL as ALL_LAYOUTS
from samestep.verification.matrix import EXPERTS, MatrixRow, layouts_of

ROOT = Path(__file__).parent.parent
SHIPPED = ("text", "language", "images", "regression")
UNTUNED = ("qwen2", "mistral", "gpt2", "t5", "vit")
MIXTURES = ("mixtral", "qwen2-moe", "olmoe", "deepseek-v3", "gpt-oss", "list", "dictionary", "stack")
REFUSED = {"en": "refused", "zh": "拒绝"}
ALL = [*SHIPPED, *UNTUNED, *MIXTURES]
PAGES = {"en": ROOT / "docs" / "matrix.md", "zh": ROOT / "docs" / "zh" / "matrix.md"}

Cells = dict[str, dict[str, str]]  # by layout and job: a number, or the reason why the layout was refused


def jobs() -> list[Job]:
    shipped = [jobfile.load(ROOT / "examples" / "proof" / f"{name}.yaml").job for name in SHIPPED]
    return shipped + [untuned(name) for name in (*UNTUNED, *MIXTURES)]


def untuned(name: str) -> Job:
    """A job of a transformers model on random data, in batches that the ranks don't divide."""
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
    rows: list[MatrixRow] = []
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
            for first, names, of_table in ((1, (*SHIPPED, *UNTUNED), ALL_LAYOUTS), (3, MIXTURES, EXPERTS)):
                own = [row for row in rows if row.job in names]
                if {row.job for row in own} == set(names):
                    cells = {**known(page, first, REFUSED[language]), **measured(own)}
                    cells = {layout: cells[layout] for layout in of_table if layout in cells}
                    lines, reasons = told(cells, REFUSED[language])
                    write_parts(page, {f"part {first}": lines, f"part {first + 1}": reasons})


def measured(rows: Sequence[MatrixRow]) -> Cells:
    """The cells of rows: the largest relative difference of all comparisons, or the reason of a refusal."""
    found: Cells = {}
    for row in rows:
        found.setdefault(row.layout, {})[row.job] = _cell(row)
    return found


def known(page: Path, first: int, refused: str) -> Cells:
    """The cells in a page: from its table and, in the part after it, the reasons."""
    reasons = dict(line.split(". ", 1) for line in read_part(page, f"part {first + 1}").splitlines())
    titles, _, *lines = ([each.strip() for each in line.split("|")[1:-1]] for line in _lines(page, first))
    found: Cells = {}
    for layout, *cells in lines:
        told = [reasons.get(cell.removeprefix(f"{refused} "), cell) for cell in cells]
        found[layout.strip("`")] = dict(zip(titles[1:], told, strict=True))
    return found


def _lines(page: Path, first: int) -> list[str]:
    return read_part(page, f"part {first}").splitlines()


def told(cells: Cells, refused: str) -> tuple[str, str]:
    """The table, a row per layout and a column per job, with numbers for the reasons; and the list of reasons."""
    titles = list(next(iter(cells.values())))
    given = [of_layout[name] for name in titles for of_layout in cells.values()]
    numbers = {reason: n for n, reason in enumerate(dict.fromkeys(each for each in given if " " in each), 1)}

    def short(cell: str) -> str:
        return f"{refused} {numbers[cell]}" if cell in numbers else cell

    lines = [[f"`{layout}`", *(short(of_layout[name]) for name in titles)] for layout, of_layout in cells.items()]
    return markdown_table(["", *titles], lines), "\n".join(f"{n}. {reason}" for reason, n in numbers.items())


def _cell(row: MatrixRow) -> str:
    if row.proof is not None:
        largest = f"{max(row.proof.max_relative_difference.values()):.0e}"
        return largest if row.proof.same_step else f"**{largest}**"
    return _reason(row) if row.reason else "**failed**"


def _reason(row: MatrixRow) -> str:
    """The reason why a layout was refused, without the layout's own name, which differs from row to row."""
    return re.sub(r'^layout "[^"]*": ', "", row.reason or "")


if __name__ == "__main__":
    main()
