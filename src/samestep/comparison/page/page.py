"""The report as one page: its sections, put together from tables and plots."""

from html import escape
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from samestep.comparison.page import texts
from samestep.comparison.page.html import both
from samestep.comparison.page.plots import figures
from samestep.comparison.page.tables import costs, published, times
from samestep.comparison.rows import Comparison
from samestep.comparison.words import Words


def page(found: Comparison) -> str:
    """The page as text. It holds plotly's program and needs nothing from elsewhere."""
    name = str(found.job.name or found.job.recipe.task)
    return Template(_file("page.html")).substitute(
        title=escape(name),
        heading=both(texts.HEADING.format(job=name)),
        css=_file("page.css"),
        js=_file("page.js"),
        plotly=get_plotlyjs(),
        figures=figures(found),
        body=_body(found),
    )


def _body(found: Comparison) -> str:
    metric = (found.metric_name or "metric").replace("_", " ")
    recipe = found.job.recipe
    intro = texts.INTRO.format(
        methods=len(found.rows),
        measured=sum(bool(row.runs) for row in found.rows),
        processes=found.processes,
        cores=found.cores,
        repeats=found.repeats,
        batch=recipe.batch,
        precision=recipe.precision,
    )
    return "\n".join(
        [
            _paragraph(intro),
            _paragraph(texts.PASSED if found.passed else texts.NOT_PASSED, "good" if found.passed else "bad"),
            _section(texts.TABLE, times(found), texts.ABOUT_TIMES),
            _section(texts.COSTS, costs(found), texts.ABOUT_COSTS),
            _section(texts.TIME, _plot("times"), texts.ABOUT_SPREAD),
            _section(texts.LOSS, _plot("losses"), texts.ABOUT_LOSS),
            _section(texts.SCORE.format(metric=metric), _plot("scores"), texts.ABOUT_SCORE),
            _section(texts.MEMORY, _plot("memory"), texts.ABOUT_MEMORY),
            _section(texts.TRAFFIC, _plot("traffic"), texts.ABOUT_TRAFFIC),
            _section(texts.PUBLISHED, published(found), texts.ABOUT_PUBLISHED),
            _section(texts.MACHINE, _machine(found)),
        ]
    )


def _section(title: Words, content: str, about: Words | None = None) -> str:
    return f"<section>\n<h2>{both(title)}</h2>\n{_paragraph(about, 'quiet') if about else ''}\n{content}\n</section>"


def _paragraph(text: Words, kind: str = "") -> str:
    return f'<p class="{kind}">{both(text)}</p>'


def _plot(name: str) -> str:
    return f'<div class="plot" id="{name}"></div><noscript><p>{both(texts.NO_SCRIPT)}</p></noscript>'


def _machine(found: Comparison) -> str:
    machine = found.machine
    memory = machine.get("memory_bytes")
    lines: list[tuple[Words, str]] = [
        (Words("system", "系统"), str(machine["system"])),
        (Words("processor", "处理器"), str(machine["processor"])),
        (Words("cores", "核数"), str(machine["cores"])),
        (Words("memory", "内存"), f"{memory / 1e9:,.1f} GB" if memory else ""),
        (Words("accelerators", "加速器"), str(machine["accelerators"])),
    ]
    versions = {**found.versions, **machine["packages"]}
    lines += [(Words(name, name), version) for name, version in sorted(versions.items())]
    return "<dl>" + "".join(f"<dt>{both(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines) + "</dl>"


def _file(name: str) -> str:
    return (files("samestep.comparison.page") / name).read_text(encoding="utf-8")
