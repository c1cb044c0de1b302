"""A job's plan and what was measured: tables in the terminal, and a page that fetches nothing."""

from collections.abc import Mapping, Sequence
from html import escape

from rich.console import Console

from samestep.display.page import Cell, Heading, html_table, plain_document
from samestep.display.tables import formatted, numbers, plain_console, table, texts
from samestep.job_plan.machine import CAUSES
from samestep.job_plan.measure import Measured
from samestep.job_plan.plan import JobPlan
from samestep.job_plan.predict import Prediction, slower_by
from samestep.sizes import decimal_size

# Okabe and Ito's colours, which people who see few colours tell apart.
_CAUSES: Mapping[str, str] = dict(
    zip(CAUSES, ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#999999", "#d55e00", "#cc79a7"), strict=True)
)
_MEMORY = {
    "parameters": "#0072b2", "optimizer_state": "#009e73", "activations": "#e69f00",
    "gathered_and_gradients": "#56b4e9",
}  # fmt: skip
_STYLE = """
.bar { display: flex; height: 1em; min-width: 12em } .bar i { display: block; height: 100% }
.key i { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em }
"""


def print_job_plan(plan: JobPlan, most: int, console: Console | None = None) -> None:
    """The fastest layouts with where their step goes, and how many could not be had."""
    console = console or plain_console()
    machine = plan.machine
    sizes = len({prediction.micro_batch for prediction in plan.predictions}) > 1
    figures = [*(["micro-batch"] if sizes else []), "memory a rank", "s a step", "times the best"]
    columns = [
        *texts("layout"),
        *texts("bound by", whole=True),
        *numbers(*figures, whole=True),
        *texts("slower by"),
    ]
    best = plan.best
    rows = [
        [
            prediction.layout,
            prediction.bound if prediction.fits else "does not fit",
            *([str(prediction.micro_batch or "whole")] if sizes else []),
            decimal_size(prediction.peak_bytes),
            f"{prediction.seconds:.3g}",
            f"{prediction.seconds / best.seconds:.2f}",
            _slower(prediction, best),
        ]
        for prediction in plan.predictions[:most]
    ]
    title = f"layouts on {machine.name}, {machine.devices:,} {_unit(plan)}: predicted"
    console.print(table(columns, rows, title=title))
    shares = sorted(best.parts.items(), key=lambda part: -part[1])
    causes = ", ".join(f"{cause} {seconds / best.seconds:.0%}" for cause, seconds in shares if seconds)
    console.print(f'"{best.layout}": {causes}', soft_wrap=True)
    tried = len(plan.predictions) + len(plan.refused)
    console.print(
        f"{tried} layouts rehearsed, {len(plan.refused)} refused by the job or its model, {len(plan.untried)} left "
        "out for want of time; --json has the reasons",
        soft_wrap=True,
    )


def _slower(prediction: Prediction, best: Prediction) -> str:
    """By how many seconds a layout is slower than the best, and the cause that explains most of it."""
    cause, seconds = slower_by(prediction, best)
    return f"{seconds:+.2g} s {cause}" if seconds > 0 else ""


def print_measured(rows: Sequence[Measured], console: Console | None = None) -> None:
    """Predicted versus measured."""
    console = console or plain_console()
    columns = [
        *texts("layout", whole=True),
        *numbers("predicted, s", "measured, s", "error", "memory predicted", "memory measured"),
    ]
    console.print(table(columns, map(_measured_cells, rows), title="predicted, and then measured"))
    for row in rows:
        if row.reason:
            console.print(f'"{row.prediction.layout}": {row.reason}', soft_wrap=True)


def _measured_cells(measured: Measured) -> list[str]:
    """Seconds and memory, predicted and measured; of a layout that failed what was predicted."""
    predicted = measured.prediction
    if measured.seconds is None or measured.error is None:
        return [predicted.layout, f"{predicted.seconds:.3g}", "failed", "", "", ""]
    return [
        predicted.layout,
        f"{predicted.seconds:.3g}",
        f"{measured.seconds:.3g}",
        f"{measured.error:+.0%}",
        decimal_size(predicted.peak_bytes),
        decimal_size(measured.peak_bytes),
    ]


def _unit(plan: JobPlan) -> str:
    return "devices" if plan.machine.cluster is not None else "processes"


def page(plan: JobPlan, measured: Sequence[Measured], title: str) -> str:
    """The page as text: layouts, where their steps go, memory, and what was measured."""
    slowest = max(prediction.seconds for prediction in plan.predictions)
    fullest = max(prediction.peak_bytes for prediction in plan.predictions)
    rows = [
        [
            Cell(
                escape(prediction.layout)
                + (f", micro-batches of 微批 {prediction.micro_batch}" if prediction.micro_batch else "")
                + ("" if prediction.fits else " (does not fit 放不下)")
            ),
            Cell(f"{prediction.seconds:.3g}"),
            Cell(_bar(prediction.parts, _CAUSES, slowest)),
            Cell(decimal_size(prediction.peak_bytes)),
            Cell(_bar(_fullest(plan, index), _MEMORY, fullest)),
        ]
        for index, prediction in enumerate(plan.predictions)
    ]
    heads = ("layout 布局", "s a step 秒/步", "where it goes 去向", "memory a rank 每进程内存", "of what 组成")
    compared = [
        [
            Cell(escape(row.prediction.layout)),
            Cell(f"{row.prediction.seconds:.3g}"),
            Cell("failed 失败" if row.seconds is None else f"{row.seconds:.3g}"),
            Cell(formatted(row.error, "{:+.0%}")),
        ]
        for row in measured
    ]
    titles = ("layout 布局", "predicted, s 预测（秒）", "measured, s 实测（秒）", "error 误差")
    measurements = html_table("measured", list(map(Heading, titles)), compared)
    body = [
        f"<h1>{escape(title)}: {plan.machine.devices:,} x {escape(plan.machine.name)}</h1>",
        "<h2>Layouts 布局</h2>",
        _key(_CAUSES),
        _key(_MEMORY),
        html_table("layouts", list(map(Heading, heads)), rows),
        *(["<h2>Measured 实测</h2>", measurements] if measured else []),
    ]
    return plain_document(title, body, _STYLE)


def _fullest(plan: JobPlan, index: int) -> Mapping[str, float]:
    """What the fullest rank of a layout holds, in bytes."""
    usage = max(plan.predictions[index].usage, key=lambda rank: rank.parameters + rank.activations)
    return {name: getattr(usage, name) for name in _MEMORY}


def _bar(parts: Mapping[str, float], colours: Mapping[str, str], whole: float) -> str:
    """A bar whose parts are as wide as their share of `whole`."""
    marks = [
        f'<i style="width:{100 * parts[name] / whole:.1f}%;background:{colour}" title="{name}"></i>'
        for name, colour in colours.items()
    ]
    return f'<span class="bar">{"".join(marks)}</span>'


def _key(colours: Mapping[str, str]) -> str:
    names = [f'<i style="background:{colour}"></i>{name.replace("_", " ")}' for name, colour in colours.items()]
    return f'<p class="key">{"".join(names)}</p>'
