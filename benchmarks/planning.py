"""Compares the predictions of `samestep plan JOB.yaml` with measured steps: small Llamas on 2 and 4 ranks.

    python benchmarks/planning.py all FILE            # the three below, one after the other
    python benchmarks/planning.py rehearse FILE       # rehearses every layout, and keeps the counts in FILE
    python benchmarks/planning.py measure FILE        # takes their steps; needs a machine without other load
    python benchmarks/planning.py write FILE          # the table of docs/planning.md, in both languages

The rates are measured for a few seconds, those of messages as `samestep comm` does, and corrected by steps of one job
(CALIBRATION), as `--measure` does. The steps of the other jobs are predicted from these rates, and are not used to
correct them.
"""

import argparse
import json
import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, write_parts

from samestep import jobfile
from samestep.api import rehearse_job, time_steps_job
from samestep.comm.collectives import COLLECTIVES
from samestep.comm_bench.request import CommRequest, parse_sizes
from samestep.comm_bench.run import measured as comm_measured
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.machine import CAUSES, TargetMachine, this_machine
from samestep.job_plan.measure import Measured, corrected, corrections
from samestep.job_plan.predict import peak_of, predict
from samestep.layout import Layout
from samestep.planning.published import kendall_tau

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
HEADS: Mapping[str, Sequence[str]] = {
    "en": ("job", "layout", "predicted, s", "measured, s", "error", "MB predicted", "MB measured"),
    "zh": ("作业", "布局", "预测（秒）", "实测（秒）", "误差", "MB 预测", "MB 实测"),
}
# Sentences about all rows, and about one job.
SUMMARY: Mapping[str, tuple[str, str, str]] = {
    "en": (
        "{rows} rows: mean error {mean:.1%}, median {median:.1%}, largest {largest:.0%}; {within} within 10 %. "
        "Largest error of memory {memory:.2%}.",
        "{name}: tau {tau:.2f}, and the best by plan takes {times:.2f} times the best measured.",
        "The slowest of {turns} starts of a layout takes {median:.0%} longer than the fastest in the median, "
        "{largest:.0%} at most.",
    ),
    "zh": (
        "共 {rows} 行：平均误差 {mean:.1%}，中位数 {median:.1%}，最大 {largest:.0%}；{within} 行在 10% 以内。"
        "内存的最大误差 {memory:.2%}。",
        "{name}：tau {tau:.2f}，规划的最佳布局是实测最快的 {times:.2f} 倍。",
        "同一布局启动 {turns} 次，最慢的比最快的慢 {median:.0%}（中位数），最多 {largest:.0%}。",
    ),
}
TWO = ("single", "dp2", "zero1x2", "zero2x2", "fsdp2", "tp2", "tp2 sequence=split", "pp2", "cp2")
# Layers, hidden size, tokens, batch, and layouts.
JOBS: Mapping[str, tuple[int, int, int, int, Sequence[str]]] = {
    "3 x 192": (3, 192, 128, 16, ("single", "dp2", "fsdp2", "tp2", "pp2", "dp4")),
    "4 x 128": (4, 128, 128, 16, (*TWO, "dp4", "dp2 tp2")),
    "2 x 384": (2, 384, 64, 16, (*TWO, "fsdp4", "pp2 dp2")),
}
CALIBRATION = "3 x 192"
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send/recv")
STEPS, TURNS = 8, 4  # steps per start, whose median counts; starts per layout, of which the fastest counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all", "rehearse", "measure", "write"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        text = Path(folder) / "words.txt"
        text.write_text(words(), encoding="utf-8")
        for what in ("rehearse", "measure", "write") if options.what == "all" else (options.what,):
            if what == "rehearse":
                found = {"rehearsed": {name: rehearsed(job_of(name, text), name) for name in JOBS}}
            else:
                found = pickle.loads(options.file.read_bytes())
            if what == "measure":
                found["machine"] = this_machine(None, "fp32", comm=messages(Path(folder) / "comm.json"))
                turns = [measured(found["rehearsed"], text) for _ in range(TURNS)]
                found["turns"] = turns
                found["measured"] = {
                    name: {layout: min(turn[name][layout] for turn in turns) for layout in layouts}
                    for name, layouts in found["rehearsed"].items()
                }
            options.file.write_bytes(pickle.dumps(found))
            if what == "write":
                write(found)


def messages(file: Path) -> Path:
    """Measure the collectives that trainings use, as `samestep comm --processes 2 --json FILE` does."""
    sizes, kinds = parse_sizes("1KB,64KB,1MB,16MB"), tuple(kind for kind in COLLECTIVES if kind in _KINDS)
    report = comm_measured(CommRequest(sizes=sizes, device="cpu", collectives=kinds), 2)
    assert report is not None  # this process is not a rank
    file.write_text(json.dumps(report.to_json()), encoding="utf-8")
    return file


def measured(rehearsed: Mapping[str, Any], text: Path) -> dict[str, dict[str, tuple[float, int]]]:
    """Measure all layouts once. Turns keep another program's load from affecting all starts of one layout."""
    return {
        name: {layout: timed(job_of(name, text), layout) for layout in layouts} for name, layouts in rehearsed.items()
    }


def words() -> str:
    """A text of made-up words."""
    chance = random.Random(0)
    known = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8))) for _ in range(800)]
    return "\n".join(" ".join(chance.choices(known, k=12)) for _ in range(4000))


def job_of(name: str, text: Path) -> Job:
    layers, hidden, tokens, batch, _ = JOBS[name]
    model = {
        "type": "llama", "layers": layers, "hidden": hidden, "heads": 4, "key_value_heads": 4,
        "feed_forward": 3 * hidden, "tied": False,
    }  # fmt: skip
    file = text.with_name(f"{hidden}.yaml")
    data = {"source": str(text), "length": tokens, "vocabulary": 1024}
    recipe = {"task": "causal-lm", "batch": batch, "steps": 20, "data": data, "model": model}
    file.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    return jobfile.load(file, []).job


def rehearsed(job: Job, name: str) -> dict[str, Any]:
    found = {}
    for text in JOBS[name][-1]:
        layout = Layout.parse(text)
        try:
            found[text] = job_with(job, text), layout, rehearse_job(job_with(job, text), layout.size)
        except UserError as error:
            print(f"{name}, {text}: {error}")
    return found


def job_with(job: Job, layout: str) -> Job:
    return replace(job, run=replace(job.run, layout=layout, processes=None))


def timed(job: Job, layout: str) -> tuple[float, int]:
    """Seconds of the slowest rank's median step, and bytes of the rank with the most memory."""
    ranks = time_steps_job(job_with(job, layout), steps=STEPS)
    print(f"{layout}: {max(rank.seconds for rank in ranks):.3f} s", flush=True)
    return max(rank.seconds for rank in ranks), max(peak_of(rank.usage) for rank in ranks)


def rows_of(found: Mapping[str, Any], machine: TargetMachine, names: Sequence[str]) -> list[tuple[str, Measured]]:
    rows = []
    for name in names:
        for text, (job, layout, ranks) in found["rehearsed"][name].items():
            seconds, peak = found["measured"][name][text]
            prediction = predict(job, layout, machine, ranks)
            rows.append((name, Measured(prediction=prediction, seconds=seconds, peak_bytes=peak)))
    return rows


def write(found: Mapping[str, Any]) -> None:
    others = [name for name in JOBS if name != CALIBRATION]
    factors = corrections([row for _, row in rows_of(found, found["machine"], [CALIBRATION])])
    rows = rows_of(found, corrected(found["machine"], factors), others)
    print({cause: round(factors[cause], 2) for cause in CAUSES})
    print("without --measure:", summary(rows_of(found, found["machine"], others), "en"))
    for language, page in PAGES.items():
        told = f"{summary(rows, language)} {spread(found, others, language)}"
        write_parts(page, {"measured": f"{table(rows, HEADS[language])}\n\n{told}"})
    print(summary(rows, "en"))


def table(rows: Sequence[tuple[str, Measured]], heads: Sequence[str]) -> str:
    lines: list[Sequence[str]] = []
    for name, row in rows:
        lines.append(
            [
                name, f"`{row.prediction.layout}`", f"{row.prediction.seconds:.3f}", f"{row.seconds:.3f}",
                f"{row.error:+.0%}", f"{row.prediction.peak_bytes / 1e6:.1f}", f"{row.peak_bytes / 1e6:.1f}",
            ]
        )  # fmt: skip
    return markdown_table(heads, lines, align="llr")


def summary(rows: Sequence[tuple[str, Measured]], language: str) -> str:
    errors = [abs(row.error) for _, row in rows if row.error is not None]
    memory = max(abs(row.prediction.peak_bytes / row.peak_bytes - 1) for _, row in rows)
    whole, each, _ = SUMMARY[language]
    told = [
        whole.format(
            rows=len(rows),
            mean=sum(errors) / len(errors),
            median=median(errors),
            largest=max(errors),
            within=sum(error <= 0.1 for error in errors),
            memory=memory,
        )
    ]
    for name in dict.fromkeys(name for name, _ in rows):
        mine = [row for job, row in rows if job == name]
        tau = kendall_tau([row.prediction.seconds for row in mine], [row.seconds or 0.0 for row in mine])
        best = min(mine, key=lambda row: row.prediction.seconds).seconds or 0.0
        fastest = min(row.seconds or 0.0 for row in mine)
        told.append(each.format(name=name, tau=tau, times=best / fastest))
    return " ".join(told)


def spread(found: Mapping[str, Any], names: Sequence[str], language: str) -> str:
    """A sentence on the spread of starts of one layout, below which a plan's error is chance."""
    turns = found["turns"]
    each = [
        max(seconds) / min(seconds) - 1
        for name in names
        for layout in found["rehearsed"][name]
        if (seconds := [turn[name][layout][0] for turn in turns])
    ]
    return SUMMARY[language][2].format(turns=len(turns), median=median(each), largest=max(each))


if __name__ == "__main__":
    main()
