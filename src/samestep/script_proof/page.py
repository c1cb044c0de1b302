"""The verdict as a page: the difference by step and by module, in both languages, as `compare`'s report is made."""

from collections.abc import Sequence
from functools import partial
from math import log10

import plotly.graph_objects as go

from samestep.display.page import (
    Cell,
    Words,
    bullets,
    document,
    figure_layout,
    html_table,
    in_languages,
    json_in_html,
    paragraph,
    plot,
    section,
)
from samestep.display.steps_figure import LEAST, Line, steps_figure
from samestep.display.tables import formatted
from samestep.script_proof.compare import StepNumbers, Verdict

_HEADING = Words(
    "{script}: {processes} processes versus {alone}", "{script}：{processes} 个进程与 {alone} 个进程对比"
)
_SAME = Words(
    "The same step in {steps} steps: what differs is as small as the noise.",
    "{steps} 步都是同一步：差异与噪声一样小。",
)
_CURVE = Words("Difference by step", "各步的差异")
_ABOUT_CURVE = Words(
    "Relative differences between the split run and the run alone, and between two runs alone of which one had the "
    "rows of each batch in another order: the noise.",
    "切分运行与单独运行之间的相对差异，以及两次单独运行之间的相对差异（其中一次把每批的行换了顺序）：后者就是噪声。",
)
_MODULES = Words("Gradients by step and module", "各步各模块的梯度差异")
_ABOUT_MODULES = Words(
    "The largest relative difference of a gradient in each module, as a power of ten.",
    "每个模块中梯度的最大相对差异，以 10 的幂表示。",
)
_NUMBERS = Words("Numbers", "数值")
_NOTES = Words("Notes", "说明")
_NOT_COMPARED = Words("Not compared", "没有比较")


def page(verdict: Verdict, script: str) -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    return document(
        "verify",
        title=script,
        heading=_HEADING.format(script=script, processes=verdict.processes, alone=verdict.alone),
        figures=json_in_html({name: in_languages(partial(draw, verdict.curve)) for name, draw in _FIGURES.items()}),
        body=_body(verdict),
    )


def _body(verdict: Verdict) -> str:
    """The page's parts: the verdict, notes, both plots, the table."""
    parts = [paragraph(_sentence(verdict), "good" if verdict.same_step else "bad")]
    if verdict.same_step and verdict.not_compared:
        parts.append(bullets(_NOT_COMPARED, verdict.not_compared))
    if verdict.notes:
        parts.append(bullets(_NOTES, verdict.notes))
    parts.append(section(_CURVE, plot("curve"), _ABOUT_CURVE))
    parts.append(section(_MODULES, plot("modules"), _ABOUT_MODULES))
    parts.append(section(_NUMBERS, _table(verdict.curve)))
    return "\n".join(parts)


def _sentence(verdict: Verdict) -> Words:
    """The verdict in one sentence, in both languages."""
    finding = verdict.finding
    if finding is None:
        return _SAME.format(steps=verdict.steps)
    place, words = finding.place, finding.words
    return Words(
        f"Not the same step. {place.en}: {words.en}.",
        f"不是同一步。{place.zh}：{words.zh}。",
    )


def _table(curve: Sequence[StepNumbers]) -> str:
    """The numbers of each step."""
    columns = [
        (Words("step", "步"), ""),
        (Words("loss", "损失"), ""),
        (Words("gradients", "梯度"), ""),
        (Words("noise of gradients", "梯度噪声"), ""),
        (Words("parameters", "参数"), ""),
        (Words("noise of parameters", "参数噪声"), ""),
    ]
    rows = [
        [
            Cell(str(row.step)),
            Cell(formatted(row.loss, "{:.2e}")),
            Cell(f"{row.gradient:.2e}"),
            Cell(f"{row.gradient_noise:.2e}"),
            Cell(f"{row.parameters:.2e}"),
            Cell(f"{row.parameters_noise:.2e}"),
        ]
        for row in curve
    ]
    return html_table("numbers-table", columns, rows)


_LINES = (
    ("gradient", Words("gradients", "梯度"), "#d55e00", "solid"),
    ("parameters", Words("parameters", "参数"), "#0072b2", "solid"),
    ("gradient_noise", Words("noise of gradients", "梯度噪声"), "#d55e00", "dot"),
    ("parameters_noise", Words("noise of parameters", "参数噪声"), "#0072b2", "dot"),
)


def _curve(curve: Sequence[StepNumbers], language: int) -> go.Figure:
    """Differences and noise over steps, on a logarithmic axis."""
    lines = [
        Line(name=title, values=[getattr(row, name) for row in curve], color=color, dash=dash)
        for name, title, color, dash in _LINES
    ]
    return steps_figure(lines, language)


def _modules(curve: Sequence[StepNumbers], language: int) -> go.Figure:
    """Differences of gradients by module and step: powers of ten."""
    names = list(dict.fromkeys(name for row in curve for name in row.modules))
    figure = go.Figure(layout=figure_layout(160 + 22 * len(names)))
    figure.add_heatmap(
        x=[row.step for row in curve],
        y=[name or "(model)" for name in names],
        z=[[log10(max(row.modules.get(name, 0.0), LEAST)) for row in curve] for name in names],
        colorscale="Viridis",
        colorbar={"tickprefix": "1e"},
    )
    figure.update_xaxes(title_text=Words("step", "步")[language], dtick=1)
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return figure


_FIGURES = {"curve": _curve, "modules": _modules}
