"""Tables and pictures of the measurements of compression.py and compression_links.py.

    python benchmarks/compression_tables.py build/reviews-*.json [--links build/links-*.json] [--docs]
    python benchmarks/compression_tables.py docs/curves/compression-reviews-486.json --links build/links.json --docs

There is a table for each job and number of steps: bytes, the last value (mean over the seeds, with minimum and
maximum), and whether the mean is within the range of plain data parallelism over the seeds. With `--links`, also the
seconds of all steps over each link: the sum over the kinds of steps of their number in the training times the time of
such a step over the link, without start and evaluations. `--docs` writes the tables of these jobs into
docs/less-communication.md and its Chinese page, where each job has a part of its own, and writes a picture of each
table's curves and the measurements as JSON into docs/curves. Such a JSON file can be given as input again, with or
without new links.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import markdown_table, write_parts
from rich.console import Console
from rich.table import Table

from benchmarks.compression import METHODS, PLAIN, Trained
from benchmarks.compression_links import OverLink
from samestep.display.curves_svg import COLOURS, Curve, Panel, Scale, svg

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"en": DOCS / "less-communication.md", "zh": DOCS / "zh" / "less-communication.md"}
PART = "benchmarks/compression_tables.py: {job}"  # of a page
WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "heads": "method | MB sent | x fewer | {value} at the end (least to most) | within the spread of `none`",
        "link": "{link}, s",
        "gbit": "{rate} Gbit/s",
        "mbit": "{rate} Mbit/s",
        "delay": "{link} and {delay} ms",
        "title": "`examples/{job}.yaml`, {steps} steps, {seeds} seeds:",
        "one": "`examples/{job}.yaml`, {steps} steps, one seed:",
        "picture": "![{value} over bytes sent and over time]({file})",
        "over bytes": "![{value} over bytes sent]({file})",
        "seed": "one seed",
        "yes": "yes",
        "no": "no",
        "accuracy": "accuracy",
        "perplexity": "perplexity",
        "loss": "loss",
    },
    "zh": {
        "heads": "方法 | 发送 MB | 少多少倍 | 最后的{value}（最小到最大） | 在 `none` 的种子之间",
        "link": "{link}，秒",
        "gbit": "{rate} Gbit/s",
        "mbit": "{rate} Mbit/s",
        "delay": "{link}、{delay} ms",
        "title": "`examples/{job}.yaml`，{steps} 步，{seeds} 个种子：",
        "one": "`examples/{job}.yaml`，{steps} 步，一个种子：",
        "picture": "![{value}随发送的字节和时间的变化]({file})",
        "over bytes": "![{value}随发送的字节的变化]({file})",
        "seed": "一个种子",
        "yes": "是",
        "no": "否",
        "accuracy": "准确率",
        "perplexity": "困惑度",
        "loss": "损失",
    },
}

Rows = Mapping[str, Sequence[Trained]]  # the trainings of one job and number of steps, by method


class Links:
    """The measured steps over all links."""

    def __init__(self, found: Sequence[OverLink]) -> None:
        self._found = {(each.job, each.method, each.link): each for each in found}
        self._kinds = {key: each.kinds for key, each in self._found.items()}

    def measured(self, rows: Rows) -> Iterator[OverLink]:
        """The measurements of a table's job and methods; of each link and method the last one."""
        ((first, *_), *_) = rows.values()
        return (each for (job, method, _), each in self._found.items() if job == first.job and method in rows)

    def of(self, rows: Rows) -> list[str]:
        """The links over which methods of a table were measured."""
        return list(dict.fromkeys(each.link for each in self.measured(rows)))

    def over(self, rows: Rows, link: str) -> Rows:
        """The rows of a table with the methods that were measured over a link."""
        ((first, *_), *_) = rows.values()
        return {method: trained for method, trained in rows.items() if (first.job, method, link) in self._kinds}

    def seconds(self, trained: Trained, link: str) -> list[float]:
        """Seconds of all steps up to each evaluation."""
        times = {kind: self._step(trained, link, int(kind)) for kind in trained.kinds}
        return [
            sum(counts[number] * times[kind] for kind, counts in trained.kinds.items())
            for number in range(len(trained.curve))
        ]

    def _step(self, trained: Trained, link: str, sent: int) -> float:
        """Seconds of a step that sends `sent` bytes.

        A step of a warm-up may not have been measured with the method itself: it is one of plain data parallelism.
        """
        measured = self._kinds[trained.job, trained.method, link]
        known = {**self._kinds.get((trained.job, PLAIN, link), {}), **measured}
        return statistics.mean(known[min(known, key=lambda kind: abs(int(kind) - sent))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--links", nargs="*", type=Path, default=[])
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into the docs")
    options = parser.parse_args()
    found, links = read(options.files, options.links)
    for rows in by_training(found):
        show(rows, links)
    if options.docs:
        write_docs(by_training(found), links)


def read(files: Sequence[Path], of_links: Sequence[Path]) -> tuple[list[Trained], Links]:
    """Read files of compression.py, compression_links.py and this program; links of later files come first."""
    trained: list[Trained] = []
    links: list[OverLink] = []
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        both = content if isinstance(content, dict) else {"trained": content, "links": []}
        trained += (Trained(**each) for each in both["trained"])
        links += (OverLink(**each) for each in both["links"])
    for file in of_links:
        links += (OverLink(**each) for each in json.loads(file.read_text(encoding="utf-8")))
    return trained, Links(links)


def by_training(found: Sequence[Trained]) -> list[Rows]:
    """The rows of each job and number of steps, by method."""
    trainings: dict[tuple[str, int], dict[str, list[Trained]]] = {}
    for each in found:
        trainings.setdefault((each.job, each.steps), {}).setdefault(each.method, []).append(each)
    order = list(METHODS)
    return [dict(sorted(rows.items(), key=lambda row: order.index(row[0]))) for rows in trainings.values()]


def heads(rows: Rows, links: Links, words: Mapping[str, str]) -> list[str]:
    ((first, *_), *_) = rows.values()
    names = words["heads"].format(value=words[first.value]).split(" | ")
    return [*names, *(words["link"].format(link=in_words(link, words)) for link in links.of(rows))]


def in_words(link: str, words: Mapping[str, str]) -> str:
    """The title of a link that compression_links.py calls "100mbit+20ms", say."""
    rate, _, delay = link.partition("+")
    shown = words[rate[-4:]].format(rate=rate[:-4])
    return words["delay"].format(link=shown, delay=delay.removesuffix("ms")) if delay else shown


def cells(rows: Rows, links: Links, method: str, words: Mapping[str, str]) -> list[str]:
    """A method's cells: bytes, their ratio, the last value over the seeds, whether it is in plain's range, times."""
    mine, plain = rows[method], rows.get(PLAIN)
    sent = statistics.mean(each.sent for each in mine)
    last = [each.reached for each in mine]
    fewer, within = "", ""
    if plain is not None:
        fewer = f"{statistics.mean(each.sent for each in plain) / sent:.1f}"
        if len(plain) > 1 and method != PLAIN:
            theirs = [each.reached for each in plain]
            good = _better(mine[0].value)
            enough = good(statistics.mean(last), max(theirs) if good is _less else min(theirs))
            within = words["yes" if enough else "no"]
    digits = 3 if mine[0].value == "accuracy" else 1
    spread = f"{min(last):.{digits}f}-{max(last):.{digits}f}" if len(last) > 1 else words["seed"]
    shown = f"{statistics.mean(last):.{digits}f} ({spread})"
    times = [
        f"{statistics.mean(links.seconds(each, link)[-1] for each in mine):.0f}"
        if method in links.over(rows, link)
        else ""
        for link in links.of(rows)
    ]
    return [f"{sent / 1e6:.1f}", fewer, shown, within, *times]


def _less(value: float, limit: float) -> bool:
    return value <= limit


def _more(value: float, limit: float) -> bool:
    return value >= limit


def _better(value: str) -> Callable[[float, float], bool]:
    """The comparison by which a value is at least as good as another: accuracies should be high, losses low."""
    return _more if value == "accuracy" else _less


def show(rows: Rows, links: Links) -> None:
    plain, *_ = rows.values()
    first = plain[0]
    seeds = ", ".join(str(each.seed) for each in plain)
    table = Table(title=f"{first.job}: {first.steps} steps, seeds {seeds}")
    for name in heads(rows, links, WORDS["en"]):
        table.add_column(name.replace("`", ""), justify="right")
    table.add_column("ms a step", justify="right")
    for method in rows:
        milliseconds = f"{1e3 * statistics.median(each.step_seconds for each in rows[method]):.0f}"
        table.add_row(method, *cells(rows, links, method, WORDS["en"]), milliseconds)
    Console().print(table)


def write_docs(trainings: Sequence[Rows], links: Links) -> None:
    """Write these jobs' parts of both pages, their pictures and measurements; other jobs' are not changed."""
    for language, page in PAGES.items():
        parts: dict[str, list[str]] = {}
        for rows in trainings:
            ((first, *_), *_) = rows.values()
            parts.setdefault(PART.format(job=first.job), []).append(section(rows, links, language))
        write_parts(page, {name: "\n\n".join(sections) for name, sections in parts.items()})
    for rows in trainings:
        file = DOCS / "curves" / picture_name(rows)
        file.write_text(picture(rows, links), encoding="utf-8")
        file.with_suffix(".json").write_text(measured_json(rows, links), encoding="utf-8")


def measured_json(rows: Rows, links: Links) -> str:
    """The measurements behind a table and its picture as JSON, one training or link per line; `read` reads it."""
    lists = {"trained": [each for trained in rows.values() for each in trained], "links": list(links.measured(rows))}
    parts = (
        f'"{name}": [\n' + ",\n".join(json.dumps(asdict(each)) for each in found) + "\n]"
        for name, found in lists.items()
    )
    return "{" + ",\n".join(parts) + "}\n"


def section(rows: Rows, links: Links, language: str) -> str:
    """A title, a table and a picture in Markdown."""
    words = WORDS[language]
    ((first, *others), *_) = rows.values()
    named = {"job": first.job, "steps": f"{first.steps:,}", "seeds": 1 + len(others)}
    lines = [[f"`{method}`", *cells(rows, links, method, words)] for method in rows]
    table = markdown_table(heads(rows, links, words), lines, align="lrrrlr")
    folder = "curves" if language == "en" else "../curves"
    shown = words["picture" if links.of(rows) else "over bytes"].format(
        value=words[first.value], file=f"{folder}/{picture_name(rows)}"
    )
    return "\n\n".join([words["title" if others else "one"].format(**named), table, shown])


def picture_name(rows: Rows) -> str:
    ((first, *_), *_) = rows.values()
    return f"compression-{first.job}-{first.steps}.svg"


def picture(rows: Rows, links: Links) -> str:
    """The SVG with each method's mean over the seeds, over bytes and over the seconds of each link."""
    ((first, *_), *_) = rows.values()
    title = f"{first.job}, {first.steps} steps: {first.value}"
    panels = [
        _panel(
            f"{title} over MB sent", rows, Scale(base=10), lambda each: [sent / 1e6 for _, _, sent, _ in each.curve]
        )
    ]
    for link in links.of(rows):
        name = f"{title} over seconds of steps, {in_words(link, WORDS['en'])}"
        over = links.over(rows, link)
        panels.append(_panel(name, over, Scale(base=None), lambda each, link=link: links.seconds(each, link)))
    return svg(title, panels)


def _panel(title: str, rows: Rows, across: Scale, of: Callable[[Trained], Sequence[float]]) -> Panel:
    curves: list[Curve] = []
    for method, trained in rows.items():
        columns = zip(*(of(each) for each in trained), strict=True)
        values = zip(*([point[3] for point in each.curve] for each in trained), strict=True)
        points = [(statistics.mean(x), statistics.mean(y)) for x, y in zip(columns, values, strict=True)]
        colour = list(METHODS).index(method) % len(COLOURS)  # the method's own, whichever others are shown
        curves.append(Curve(name=method, colour=colour, dash=0, points=points))
    return Panel(title=title, curves=curves, across=across, up=Scale(base=None))


if __name__ == "__main__":
    main()
