"""A job's plan as one page of HTML that fetches nothing: layouts, where their steps go, memory, what was measured."""

from collections.abc import Mapping, Sequence
from html import escape

from samestep.display.tables import bytes_shown
from samestep.job_plan.machine import CAUSES
from samestep.job_plan.measure import Measured
from samestep.job_plan.plan import JobPlan

# Okabe and Ito's colours, which people who see few colours tell apart.
_CAUSES: Mapping[str, str] = dict(
    zip(CAUSES, ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#999999", "#d55e00", "#cc79a7"), strict=True)
)
_MEMORY = {
    "parameters": "#0072b2", "optimizer_state": "#009e73", "activations": "#e69f00",
    "gathered_and_gradients": "#56b4e9",
}  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #d5dae0; padding: .3rem .5rem; text-align: right }
th:first-child, td:first-child { text-align: left }
.bar { display: flex; height: 1em; min-width: 12em } .bar i { display: block; height: 100% }
.key i { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #e6e9ec } th, td { border-color: #3a4149 } }
"""


def page(plan: JobPlan, measured: Sequence[Measured], title: str) -> str:
    """The whole page."""
    slowest = max(each.seconds for each in plan.predictions)
    fullest = max(each.peak_bytes for each in plan.predictions)
    rows = [
        [
            escape(each.layout)
            + (f", micro-batches of 微批 {each.micro_batch}" if each.micro_batch else "")
            + ("" if each.fits else " (does not fit 放不下)"),
            f"{each.seconds:.3g}",
            _bar(each.parts, _CAUSES, slowest),
            bytes_shown(each.peak_bytes),
            _bar(_fullest(plan, index), _MEMORY, fullest),
        ]
        for index, each in enumerate(plan.predictions)
    ]
    heads = ["layout 布局", "s a step 秒/步", "where it goes 去向", "memory a rank 每进程内存", "of what 组成"]
    compared = [
        [
            escape(each.prediction.layout),
            f"{each.prediction.seconds:.3g}",
            "failed 失败" if each.seconds is None else f"{each.seconds:.3g}",
            "" if each.error is None else f"{each.error:+.0%}",
        ]
        for each in measured
    ]
    beside = ["layout 布局", "predicted, s 预测（秒）", "measured, s 实测（秒）", "error 误差"]
    body = [
        f"<h1>{escape(title)}: {plan.machine.devices:,} x {escape(plan.machine.name)}</h1>",
        "<h2>Layouts 布局</h2>",
        _key(_CAUSES),
        _key(_MEMORY),
        _table("layouts", heads, rows),
        *(["<h2>Measured 实测</h2>", _table("measured", beside, compared)] if measured else []),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _fullest(plan: JobPlan, index: int) -> Mapping[str, float]:
    """What the fullest rank of a layout holds, in bytes."""
    usage = max(plan.predictions[index].usage, key=lambda each: each.parameters + each.activations)
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


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{each}</th>" for each in heads)
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<table id="{name}"><tr>{head}</tr>{"".join(lines)}</table>'
