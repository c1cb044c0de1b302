"""Compares the memory that a plan predicts with that of real ranks: every layout x task of the proof's matrix.

    python benchmarks/plan_memory.py FILE [--jobs text gpt2 ...] [--layouts "tp4,pp2"]    # counts, kept in FILE
    python benchmarks/plan_memory.py FILE --recount [--jobs ...]    # plans alone once more, beside what ranks held
    python benchmarks/plan_memory.py FILE --docs                    # the table of docs/planning.md, in both languages

Each call replaces the given jobs and layouts, and keeps the others in FILE and in the table.

Predictions are of the ranks that `samestep train --dry-run --world N` rehearses, in one process and without memory:
one of each pipeline stage, at most three. Measured are the same ranks, which run and count every tensor in their
third step, and the rank with the most memory, which may hold more if parameters are divided unevenly.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from matrix import SHIPPED, UNTUNED, jobs
from page_parts import markdown_table, read_part, write_parts

from samestep.api import dry_run_layouts, rehearse_job
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.predict import peak_of
from samestep.layout import Layout
from samestep.training.usage import Usage
from samestep.verification.matrix import layouts_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
REFUSED = {"en": "refused", "zh": "拒绝"}
UNLIKE = {"en": "not refused", "zh": "未拒绝"}  # the plan does not refuse what the ranks refuse
# Sentences about the rehearsed ranks, and about all.
SUMMARY = {
    "en": (
        "{rows} rows; mean error {mean:.2%}, largest {largest:.1%}; {within} within 3 %, {exact} to the byte.",
        " Of the fullest rank of all the mean error is {mean:.2%}, the largest {largest:.1%}; {within} within 3 %.",
    ),
    "zh": (
        "共 {rows} 行；平均误差 {mean:.2%}，最大 {largest:.1%}；{within} 行在 3% 以内，{exact} 行一字节不差。",
        "与所有 rank 中最满的一个相比，平均误差 {mean:.2%}，最大 {largest:.1%}；{within} 行在 3% 以内。",
    ),
}
NAMES = (*SHIPPED, *UNTUNED)

Row = Mapping[str, Any]  # job, layout, and bytes by rank, predicted and measured, or the reason why there are none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--layouts", default="all")
    parser.add_argument("--recount", action="store_true")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    known: list[Row] = json.loads(options.file.read_text("utf-8")) if options.file.exists() else []
    if options.docs:
        write(known)
        return
    for job in jobs():
        if job.name in options.jobs or Path(str(job.name)).stem in options.jobs:
            layouts = layouts_of(options.layouts)
            if options.recount:
                found = [
                    {**row, "predicted": predicted(job, row["layout"])}
                    for row in known
                    if row["job"] == job.name and row["layout"] in layouts
                ]
            else:
                found = rows_of(job, layouts)
            known = merged(known, found)
            options.file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"{job.name}: {summary(found, 'en')}", flush=True)


def merged(known: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """The known rows, with those of the same job and layout replaced by `found`, in the order of jobs and layouts."""
    rows = {(row["job"], row["layout"]): row for row in (*known, *found)}
    layouts = layouts_of("all")
    return sorted(rows.values(), key=lambda row: (NAMES.index(row["job"]), layouts.index(row["layout"])))


def rows_of(job: Job, layouts: Sequence[str]) -> list[Row]:
    """Predict and measure each layout of a job."""
    really = dry_run_layouts(job, layouts)
    return [
        {"job": job.name, "layout": text, "predicted": predicted(job, text), "measured": measured(really[text])}
        for text in layouts
    ]


def predicted(job: Job, text: str) -> dict[str, int] | str:
    run = replace(job.run, layout=text, processes=None)
    try:
        ranks = rehearse_job(replace(job, run=run), Layout.parse(text).size)
    except UserError as error:
        return str(error)
    except Exception as error:  # it becomes the row's result, and the other rows are still measured
        return f"failed, {type(error).__name__}: {error}"
    return {str(each.rank): peak_of(each.usage) for each in ranks}


def measured(ranks: Sequence[Usage] | str) -> dict[str, int] | str:
    return ranks if isinstance(ranks, str) else {str(rank): peak_of(usage) for rank, usage in enumerate(ranks)}


def error_of(row: Row, *, of_all: bool = False) -> float | None:
    """The relative error for the rehearsed rank with the most memory, of the same ranks (or all); None if refused."""
    if isinstance(row["predicted"], str) or isinstance(row["measured"], str):
        return None
    found = row["measured"] if of_all else {rank: row["measured"][rank] for rank in row["predicted"]}
    return max(row["predicted"].values()) / max(found.values()) - 1


def summary(rows: Sequence[Row], language: str) -> str:
    held = [row for row in rows if error_of(row) is not None]
    told = ""
    for text, of_all in zip(SUMMARY[language], (False, True), strict=True):
        errors = [abs(error_of(row, of_all=of_all) or 0.0) for row in held]
        told += text.format(
            rows=len(errors),
            mean=sum(errors) / max(len(errors), 1),
            largest=max(errors, default=0.0),
            within=sum(error <= 0.03 for error in errors),
            exact=errors.count(0.0),
        )
    return told


def cell(row: Row, language: str) -> str:
    error = error_of(row)
    if error is not None:
        text = f"{error:+.1%}" if error else "0"
        return text if abs(error) <= 0.03 else f"**{text}**"
    if isinstance(row["predicted"], str) and isinstance(row["measured"], str):
        return REFUSED[language]
    return f"**{REFUSED[language] if isinstance(row['predicted'], str) else UNLIKE[language]}**"


def table(rows: Sequence[Row], language: str, before: str) -> str:
    """The table with the cells of `rows`, and the others as in the table before."""
    cells = cells_of(before) | {(row["job"], row["layout"]): cell(row, language) for row in rows}
    names = [name for name in NAMES if any(job == name for job, _ in cells)]
    lines = [[f"`{layout}`", *(cells.get((name, layout), "") for name in names)] for layout in layouts_of("all")]
    return markdown_table(["", *names], lines)


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """The cells of a page's table, by job and layout."""
    lines = [[each.strip() for each in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    if not lines:
        return {}
    names = lines[0][1:]
    return {
        (name, first.strip("`")): value
        for first, *values in lines[2:]
        for name, value in zip(names, values, strict=True)
    }


def summary_of_cells(text: str, language: str) -> str:
    """The summary computed from the table's cells, to a tenth of a percent, if some rows are in no file."""
    values = [value.strip("*").rstrip("%") for value in cells_of(text).values()]
    errors = [abs(float(value)) / 100 for value in values if value.lstrip("+-").replace(".", "").isdigit()]
    return SUMMARY[language][0].format(
        rows=len(errors),
        mean=sum(errors) / max(len(errors), 1),
        largest=max(errors, default=0.0),
        within=sum(error <= 0.03 for error in errors),
        exact=values.count("0"),
    )


def write(rows: Sequence[Row]) -> None:
    for language, page in PAGES.items():
        drawn = table(rows, language, read_part(page, "memory"))
        every = len(cells_of(drawn)) == len(rows)
        said = summary(rows, language) if every else summary_of_cells(drawn, language)
        write_parts(page, {"memory": f"{drawn}\n\n{said}"})


if __name__ == "__main__":
    main()
