"""Writes the tables of docs/planning.md and docs/zh/planning.md: errors against published steps, and plans.

    python tools/planner.py [--cross-validation]

Without --cross-validation, which takes minutes, its table stays as it is.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from page_parts import markdown_table, write_parts

from samestep.layout import Layout
from samestep.planning.accuracy import cross_validated, table
from samestep.planning.hardware import cluster_of
from samestep.planning.published import PredictedRow, PublishedRow, predict, read_rows
from samestep.planning.search import Plan, plan, usual_batch
from samestep.planning.shapes import known_model
from samestep.planning.software import PLANNED, SOFTWARE
from samestep.planning.stage_time import Job
from samestep.planning.step_time import step_time

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "published"
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
HEADS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "errors": {
        "en": ("rows of", "rows", "mean error", "bias", "largest error", "tau, mean", "tau, least"),
        "zh": ("数据来源", "行数", "平均误差", "偏差", "最大误差", "tau 平均", "tau 最小"),
    },
    "halves": {
        "en": ("device", "rows", "error on that half", "error on the other half", "error as shipped"),
        "zh": ("设备", "行数", "该半数上的误差", "另一半上的误差", "所附数值的误差"),
    },
    "recomputation": {
        "en": ("model", "recomputation", "published, s", "predicted, s", "error"),
        "zh": ("模型", "重计算", "公布（秒）", "预测（秒）", "误差"),
    },
    "plans": {
        "en": ("model", "H100", "program", "best layout", "micro-batch", "s a step", "MFU", "GB"),
        "zh": ("模型", "H100", "程序", "最佳布局", "微批", "秒/步", "MFU", "GB"),
    },
}
CASES = (("llama-3-8b", 8), ("llama-3-70b", 256), ("llama-3-405b", 512), ("llama-3-405b", 16384))
PROGRAMS = ("samestep", "megatron-core")

# Model, tensor slices, pipeline ranks, stages a rank, global batch, micro-batch, and seconds: with full recomputation
# and with selective recomputation and split sequences (arXiv 2205.05198, tables 3 and 5).
RECOMPUTED = (
    ("gpt-22b", 8, 1, 1, 4, 4, 1.42, 1.10),
    ("gpt-175b", 8, 8, 3, 64, 1, 18.13, 13.75),
    ("gpt-530b", 8, 35, 3, 280, 1, 49.05, 37.83),
    ("gpt-1t", 8, 64, 1, 512, 1, 94.42, 71.49),
)

Lines = Sequence[Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cross-validation", action="store_true")
    options = parser.parse_args()
    tables = {
        "errors": errors([predict(row) for row in published_rows()]),
        "recomputation": recomputation(),
        "plans": plans(),
    }
    if options.cross_validation:
        tables["halves"] = halves()
    for language, page in PAGES.items():
        write_parts(page, {name: markdown_table(HEADS[name][language], lines) for name, lines in tables.items()})


def published_rows() -> list[PublishedRow]:
    return [*read_rows(PUBLISHED / "steps.json", None), *read_rows(PUBLISHED / "vtrain_single.csv", "a100")]


def errors(rows: Sequence[PredictedRow]) -> Lines:
    """Mean, bias and largest error of each group, and the order within its models."""
    groups = table(rows)
    return [
        (
            group.name,
            f"{group.rows}",
            f"{group.mean_error:.1%}",
            f"{group.bias:+.1%}",
            f"{group.largest_error:+.0%}",
            "" if group.mean_tau is None else f"{group.mean_tau:.2f}",
            "" if group.least_tau is None else f"{group.least_tau:.2f}",
        )
        for group in groups
    ]


def halves() -> Lines:
    """Errors with efficiencies set on half of the models; of rows whose recomputation is published."""
    rows = [row for row in published_rows() if not row.group.startswith("megatron-bridge")]
    return [
        (
            each.kind,
            f"{each.rows}",
            f"{each.fitted_error:.1%}",
            f"{each.other_half_error:.1%}",
            f"{each.shipped_error:.1%}",
        )
        for each in cross_validated(rows)
    ]


def recomputation() -> Lines:
    """Steps of a paper that took no part in setting anything."""
    lines = []
    for name, tensor, pipeline, stages, batch, micro_batch, full, selective in RECOMPUTED:
        job = Job(model=known_model(name), global_batch=batch, precision="fp16", software=SOFTWARE["megatron-2021"])
        base = Layout(
            tensor=tensor,
            pipeline=pipeline,
            schedule="interleaved-1f1b" if stages > 1 else "1f1b",
            stages=stages,
            recompute="full",
        )
        split = Layout.parse(str(base).replace("recompute=full", "recompute=selective sequence=split"))
        for layout, seconds in ((base, full), (split, selective)):
            found = step_time(job, layout, micro_batch, cluster_of("a100", layout.size)).seconds
            lines.append((name, layout.recompute, f"{seconds:.2f}", f"{found:.2f}", f"{found / seconds - 1:+.0%}"))
    return lines


def planned(name: str, devices: int, program: str) -> Plan:
    model = known_model(name)
    job = Job(model=model, global_batch=usual_batch(model, devices), precision="bf16", software=PLANNED[program])
    return plan(job, cluster_of("h100", devices))


def plans() -> Lines:
    """The best layout of each case, for samestep and for Megatron-core."""
    lines = []
    for name, devices in CASES:
        for program in PROGRAMS:
            best = (found := planned(name, devices, program)).best
            lines.append(
                (
                    name,
                    f"{devices:,}",
                    program,
                    f"`{best.layout}`",
                    f"{best.micro_batch}",
                    f"{best.time.seconds:.1f}",
                    f"{best.time.utilisation(found.cluster.device, 'bf16'):.0%}",
                    f"{best.peak_bytes / 1e9:.0f}",
                )
            )
    return lines


if __name__ == "__main__":
    main()
