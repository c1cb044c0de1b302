"""Writes the tables of docs/planning.md and docs/zh/planning.md: errors against published steps, and plans.

    python tools/planner.py [--cross-validation]

Without --cross-validation, which takes minutes, its table stays as it is.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cross_validation import cross_validated
from page_parts import markdown_table, write_parts

from samestep.layout import Layout, Recompute, Schedule, SequenceOption
from samestep.planning.accuracy import table
from samestep.planning.hardware import cluster_of
from samestep.planning.memory import in_flight, kept_activations, memory_of, state_bytes
from samestep.planning.published import PredictedRow, PublishedRow, predict, read_rows
from samestep.planning.search import ClusterPlan, plan, usual_batch
from samestep.planning.shapes import known_model
from samestep.planning.software import PLANNED, SOFTWARE
from samestep.planning.stage_time import PlannedJob, layers_of_stages
from samestep.planning.step_time import step_time

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "published"
PAGES = {"en": ROOT / "docs" / "planning.md", "zh": ROOT / "docs" / "zh" / "planning.md"}
HEADS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "errors": {
        "en": ("rows of", "rows", "mean error", "bias", "largest error", "tau, mean", "tau, least", "could be"),
        "zh": ("数据来源", "行数", "平均误差", "偏差", "最大误差", "tau 平均", "tau 最小", "至多"),
    },
    "halves": {
        "en": ("device", "rows", "error on that half", "error on the other half", "error as shipped"),
        "zh": ("设备", "行数", "该半数上的误差", "另一半上的误差", "所附数值的误差"),
    },
    "recomputation": {
        "en": ("model", "recomputation", "published, s", "predicted, s", "error"),
        "zh": ("模型", "重计算", "公布（秒）", "预测（秒）", "误差"),
    },
    "memories": {
        "en": ("model", "what", "published", "counted", "error"),
        "zh": ("模型", "内容", "公布", "计算", "误差"),
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

# Of the same models in the same layouts, GiB of a device: parameters with optimizer state, activations, and these
# with selective recomputation and split sequences (figure 1); activations of a layer in per cent of those without
# either, with split sequences, with selective recomputation, with both, with full recomputation (figure 7). As
# Calculon transcribed them (calculon-ai/calculon, calculon/llm/validation.py).
KEPT: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "gpt-22b": ((45.5625, 59.25, 9.5625), (66.84, 49.42, 16.18, 7.64)),
    "gpt-175b": ((45.5625, 66.84375, 12.3515625), (62.04, 56.53, 18.49, 8.71)),
    "gpt-530b": ((31.640625, 114.0234375, 23.076171875), (58.31, 62.04, 20.27, 9.42)),
    "gpt-1t": ((32.958984375, 131.25, 26.5625), (58.31, 62.04, 20.27, 9.42)),
}
WAYS: Sequence[tuple[Recompute, SequenceOption]] = (
    ("none", "split"), ("selective", "whole"), ("selective", "split"), ("full", "whole"),
)  # fmt: skip
# GiB of the fullest device of 8 pipeline ranks of Llama-2-7B (AMD-AGI/Primus, docs_deprecated/tech_blogs/
# primus_pipeline). Their FLOPs a token, 235.7 T / 10,057, are those of 16 layers of 4,096 tokens.
PRIMUS: Sequence[tuple[Schedule, int, float]] = (
    ("1f1b", 1, 16.26), ("interleaved-1f1b", 2, 21.40), ("interleaved-zero-bubble", 2, 16.59),
    ("zbv-zero-bubble", 2, 18.11),
)  # fmt: skip
PRIMUS_LAYERS = 16

Lines = Sequence[Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cross-validation", action="store_true")
    options = parser.parse_args()
    tables = {
        "errors": errors([predict(row) for row in published_rows()]),
        "recomputation": recomputation(),
        "memories": memories(),
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
            "" if group.least_ceiling is None else f"{group.least_ceiling:.2f}",
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
        job = PlannedJob(
            model=known_model(name), global_batch=batch, precision="fp16", software=SOFTWARE["megatron-2022"]
        )
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


def memories() -> Lines:
    """Memory that papers and others have published, and what is counted of the same."""
    found = [
        row
        for name, tensor, pipeline, stages, batch, micro_batch, _, _ in RECOMPUTED
        for row in _kept_as_in_the_paper(name, tensor, pipeline, stages, batch, micro_batch)
    ]
    model = replace(known_model("llama-2-7b"), layers=PRIMUS_LAYERS)
    job = PlannedJob(model=model, global_batch=64, precision="bf16", software=SOFTWARE["megatron-core"])
    for schedule, stages, published in PRIMUS:
        layout = Layout(pipeline=8, schedule=schedule, stages=stages)
        peak = max(rank.total for rank in memory_of(job, layout, 1)) / 2**30
        found.append((f"llama-2-7b, {PRIMUS_LAYERS} layers", f"pp8 schedule={schedule}", published, peak, "GiB"))
    return [
        (name, what, f"{given:.1f} {unit}", f"{counted:.1f} {unit}", f"{counted / given - 1:+.0%}")
        for name, what, given, counted, unit in found
    ]


def _kept_as_in_the_paper(
    name: str, tensor: int, pipeline: int, stages: int, batch: int, micro_batch: int
) -> list[tuple[str, str, float, float, str]]:
    """Model, what it is, as published, as counted, and its unit: of one model of figures 1 and 7."""
    model, software = known_model(name), SOFTWARE["megatron-2022"]
    schedule: Schedule = "interleaved-1f1b" if stages > 1 else "1f1b"
    base = Layout(tensor=tensor, pipeline=pipeline, stages=stages, schedule=schedule)
    layers = tuple(layers_of_stages(model.layers, pipeline * stages))
    at_once = in_flight(base, batch // micro_batch, 0, layers)

    def kept(how: Recompute, sequence: SequenceOption) -> float:
        return kept_activations(model, micro_batch, replace(base, recompute=how, sequence=sequence), software)

    (state, whole, both), shares = KEPT[name]
    counted = sum(state_bytes(model.parameters / (tensor * pipeline), base, software))
    most = [at_once * bytes_kept / 2**30 for bytes_kept in (kept("none", "whole"), kept("selective", "split"))]
    of_layer = [
        (f"of a layer, recompute={way[0]} sequence={way[1]}", share, 100 * kept(*way) / kept("none", "whole"))
        for way, share in zip(WAYS, shares, strict=True)
    ]
    return [
        (name, "parameters, gradients, optimizer", state, counted / 2**30, "GiB"),
        (name, "activations", whole, most[0], "GiB"),
        (name, "activations, recompute=selective sequence=split", both, most[1], "GiB"),
        *((name, what, share, part, "%") for what, share, part in of_layer),
    ]


def planned(name: str, devices: int, program: str) -> ClusterPlan:
    model = known_model(name)
    job = PlannedJob(
        model=model, global_batch=usual_batch(model, devices), precision="bf16", software=PLANNED[program]
    )
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
