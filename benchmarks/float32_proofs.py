"""What proofs in float32 and bfloat16 find of mistakes in engines, as fractions of what rounding allows.

    python benchmarks/float32_proofs.py [--precisions fp32 bf16] [--engines native deepspeed] [--docs]

The mistakes, the engines with them and the task are those of the tests (tests/float32_mistakes.py); a layout takes
five steps, and one process in float64 takes them as well. A fraction above 1 is another step. `--docs` writes the two
tables of docs/promise.md and docs/zh/promise.md, in which a cell has the least and the largest of all engines.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from page_parts import MeasuredTable, markdown_table

import samestep
from samestep.verification.proof import Proof
from tests.float32_mistakes import (
    MISTAKES,
    SUMMED,
    Float32,
    PlantedAccelerate,
    PlantedDataParallel,
    PlantedDeepSpeed,
    PlantedParameterServer,
)
from tests.proving import prove
from tests.small_tasks import Points

STEPS = 5
EVERY = ("", *MISTAKES, SUMMED)  # "": none
# Of each engine the class with mistakes, and the layout of its proofs.
ENGINES: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "native": (Float32, "dp2"),
    "accelerate": (PlantedAccelerate, "dp2"),
    "deepspeed": (PlantedDeepSpeed, "zero1x2"),
    "data-parallel": (PlantedDataParallel, "single"),
    "parameter-server": (PlantedParameterServer, "dp3"),
}
OF_PRECISION = {"fp32": tuple(ENGINES), "bf16": ("native", "deepspeed")}

Row = Mapping[str, Any]  # precision, engine, mistake, and what was found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=OF_PRECISION, default=list(OF_PRECISION))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    options = parser.parse_args()
    for precision in options.precisions:
        engines = [engine for engine in OF_PRECISION[precision] if engine in options.engines]
        rows = [row for engine in engines for row in rows_of(engine, precision)]
        print(markdown(rows, "en", precision=precision), flush=True)
        if options.docs:
            TABLES[precision].keep(rows)


def rows_of(engine: str, precision: str) -> list[dict[str, Any]]:
    """Prove every mistake of an engine, in one start of its ranks."""
    made, layout = ENGINES[engine]
    recipe = samestep.Recipe(
        task=Points(),
        batch=33,
        steps=8,
        optimizer=samestep.AdamW(lr=1e-2),
        schedule=samestep.Schedule(warmup=2, decay="cosine"),
    )
    cases = {mistake: (recipe, layout, {"engine": made(mistake)}) for mistake in EVERY}
    rows = []
    for mistake, proof in prove(cases, steps=STEPS, precision=precision).items():
        if not isinstance(proof, Proof) or proof.rounding is None:
            raise SystemExit(f"{engine}, {mistake or 'no mistake'}: {proof}")
        found = {name: getattr(proof.rounding, name) for name in FIGURES}
        rows.append({"engine": engine, "layout": layout, "mistake": mistake, **found, "same": proof.rounding.same})
    return rows


def markdown(rows: Sequence[Row], language: str, *, precision: str) -> str:
    """A row a mistake; in float32 the optimizer's rule, which is only needed in bfloat16, has no column."""
    names = FIGURES if precision == "bf16" else FIGURES[:2]
    lines = []
    for mistake, titles in MISTAKE.items():
        mine = [row for row in rows if row["mistake"] == mistake]
        line = [titles[language], *(of_all([row[name] for row in mine]) for name in names)]
        if precision == "bf16":
            line.append(YES[language][all(row["same"] for row in mine)])
        lines.append(line)
    heads = TITLES[language]
    return markdown_table(heads if precision == "bf16" else heads[: len(names) + 1], lines, align="l")


def of_all(found: Sequence[float | None]) -> str:
    """The least and the largest of what was found."""
    known = [each for each in found if each is not None]
    ends = dict.fromkeys(shown(each) for each in (min(known), max(known)))
    return " - ".join(ends)


def shown(value: float) -> str:
    """Two digits of a small number, three of a large one."""
    if value < 1e-3:
        return "0"
    if value < 10:
        return f"{value:.2g}"
    return f"{value if value < 1e5 else float(f'{value:.3g}'):,.0f}"


FIGURES = ("parameters", "optimizer_state", "update")
YES = {"en": {True: "yes", False: "no"}, "zh": {True: "是", False: "否"}}
TITLES: Mapping[str, Sequence[str]] = {
    "en": ("injected", "parameters", "optimizer state", "update", "the same step"),
    "zh": ("植入", "参数", "优化器状态", "更新", "同一步"),
}
MISTAKE: Mapping[str, Mapping[str, str]] = {
    "": {"en": "nothing", "zh": "无"},
    "no decay": {"en": "no weight decay", "zh": "没有权重衰减"},
    "ten times the decay": {"en": "ten times the weight decay", "zh": "十倍权重衰减"},
    "decay on biases": {"en": "weight decay on biases too", "zh": "偏置也衰减"},
    "wrong eps": {"en": "`eps` 1e-6 in place of 1e-8", "zh": "`eps` 是 1e-6 而不是 1e-8"},
    "wrong beta2": {"en": "`beta2` 0.99 in place of 0.999", "zh": "`beta2` 是 0.99 而不是 0.999"},
    SUMMED: {
        "en": "gradients summed over the ranks, AdamW without clipping",
        "zh": "梯度在各 rank 间求和，AdamW 不裁剪",
    },
}
TABLES: Mapping[str, MeasuredTable] = {
    precision: MeasuredTable(
        name=f"proofs-{precision}",
        part=f"benchmarks/float32_proofs.py {precision}",
        page="docs/promise.md",
        text=partial(markdown, precision=precision),
    )
    for precision in OF_PRECISION
}


if __name__ == "__main__":
    main()
