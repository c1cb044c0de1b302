"""The memory that a plan counts beside what ranks really hold: every layout x task of the proof's matrix.

    python benchmarks/plan_memory.py FILE [--jobs text gpt2 ...]    # counts, and keeps the numbers in FILE
    python benchmarks/plan_memory.py FILE --docs                    # the table of docs/planning.md, in both languages

Predicted are the ranks that `samestep train --dry-run --world N` rehearses, in one process and without memory: one of
each pipeline stage, three at most. Measured are the same ranks, which run and count every tensor in their third step;
and the fullest rank of all, which may hold more where samples are longer or parameters are shared out unevenly.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matrix import SHIPPED, UNTUNED, jobs

from samestep.api import dry_run_layouts, rehearse_job
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.predict import peak_of
from samestep.layout import Layout
from samestep.matrix import layouts_of
from samestep.training.usage import Usage

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
REFUSED = {"en": "refused", "zh": "拒绝"}
UNLIKE = {"en": "not refused", "zh": "未拒绝"}  # by the plan, of what the ranks refuse
SUMMARY = {
    "en": "{rows} rows; mean error {mean:.2%}, largest {largest:.1%}; {within} within 3 %, {exact} to the byte. "
    "Of the fullest rank of all the mean error is {all_mean:.2%}, the largest {all_largest:.1%}; {all_within} within "
    "3 %.",
    "zh": "共 {rows} 行；平均误差 {mean:.2%}，最大 {largest:.1%}；{within} 行在 3% 以内，"
    "{exact} 行一字节不差。与所有 rank 中最满的一个相比，平均误差 {all_mean:.2%}，"
    "最大 {all_largest:.1%}；{all_within} 行在 3% 以内。",
}
NAMES = (*SHIPPED, *UNTUNED)

Row = Mapping[str, Any]  # job, layout, and bytes by rank, predicted and measured, or why there are none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--layouts", default="all")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    known: list[Row] = json.loads(options.file.read_text("utf-8")) if options.file.exists() else []
    if options.docs:
        write(known)
        return
    for job in jobs():
        if job.name in options.jobs or Path(str(job.name)).stem in options.jobs:
            found = rows_of(job, layouts_of(options.layouts))
            known = [row for row in known if row["job"] != job.name] + found
            options.file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"{job.name}: {summary(found, 'en')}", flush=True)


def rows_of(job: Job, layouts: Sequence[str]) -> list[Row]:
    """Each layout of a job, predicted and measured."""
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
    except Exception as error:  # a row of its own; the others hold
        return f"failed, {type(error).__name__}: {error}"
    return {str(each.rank): peak_of(each.usage) for each in ranks}


def measured(ranks: Sequence[Usage] | str) -> dict[str, int] | str:
    return ranks if isinstance(ranks, str) else {str(rank): peak_of(usage) for rank, usage in enumerate(ranks)}


def error_of(row: Row, *, of_all: bool = False) -> float | None:
    """Of the fullest rehearsed rank, relative to what the same ranks (or all) held; None where it was refused."""
    if isinstance(row["predicted"], str) or isinstance(row["measured"], str):
        return None
    found = row["measured"] if of_all else {rank: row["measured"][rank] for rank in row["predicted"]}
    return max(row["predicted"].values()) / max(found.values()) - 1


def summary(rows: Sequence[Row], language: str) -> str:
    held = [row for row in rows if error_of(row) is not None]
    errors, of_all = ([abs(error_of(row, of_all=every) or 0.0) for row in held] for every in (False, True))
    return SUMMARY[language].format(
        rows=len(errors),
        mean=sum(errors) / max(len(errors), 1),
        largest=max(errors, default=0.0),
        within=sum(error <= 0.03 for error in errors),
        exact=errors.count(0.0),
        all_mean=sum(of_all) / max(len(of_all), 1),
        all_largest=max(of_all, default=0.0),
        all_within=sum(error <= 0.03 for error in of_all),
    )


def cell(row: Row, language: str) -> str:
    error = error_of(row)
    if error is not None:
        text = f"{error:+.1%}" if error else "0"
        return text if abs(error) <= 0.03 else f"**{text}**"
    if isinstance(row["predicted"], str) and isinstance(row["measured"], str):
        return REFUSED[language]
    return f"**{REFUSED[language] if isinstance(row['predicted'], str) else UNLIKE[language]}**"


def table(rows: Sequence[Row], language: str) -> str:
    names = list(dict.fromkeys(row["job"] for row in rows))
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --: |' * len(names)}"]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        cells = {row["job"]: cell(row, language) for row in rows if row["layout"] == layout}
        lines.append(f"| `{layout}` | {' | '.join(cells[name] for name in names)} |")
    return "\n".join(lines)


def write(rows: Sequence[Row]) -> None:
    for language, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        before, begin, rest = text.partition("<!-- memory -->\n")
        _, end, after = rest.partition("<!-- /memory -->")
        if not begin or not end:
            raise SystemExit(f"{page} has no line <!-- memory --> with <!-- /memory --> after it; write them there")
        told = f"{table(rows, language)}\n\n{summary(rows, language)}\n"
        page.write_text(f"{before}{begin}{told}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
