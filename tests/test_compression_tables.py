"""benchmarks/compression_tables.py, which writes the tables and pictures of docs/less-communication.md."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_parts import read_part

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def modules() -> Any:
    """The two programs."""
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from benchmarks import compression_tables

        yield compression_tables
    finally:
        sys.path.remove(str(ROOT))
        sys.path.remove(str(ROOT / "tools"))


def trained(modules: Any, method: str, values: Sequence[float], kinds: Mapping[str, Sequence[int]], seed: int) -> Any:
    """A training of 20 steps that was evaluated in its middle and at its end."""
    sent = [sum(int(kind) * counts[number] for kind, counts in kinds.items()) for number in range(2)]
    return modules.Trained(
        job="reviews",
        method=method,
        seed=seed,
        communication=None,
        value="accuracy",
        curve=[(10, 1.0, sent[0], values[0]), (20, 2.0, sent[1], values[1])],
        kinds=kinds,
        step_seconds=0.1,
    )


def rows_of(modules: Any) -> Any:
    plain = {"1000": [10, 20]}
    one_bit = {"998": [4, 4], "40": [6, 16]}
    found = [trained(modules, "one-bit-adam", (0.4, last), one_bit, seed) for seed, last in enumerate((0.5, 0.6))]
    found += [trained(modules, "none", (0.5, last), plain, seed) for seed, last in enumerate((0.54, 0.62))]
    (rows,) = modules.by_training(found)
    return rows


def links_of(modules: Any, **of_methods: Mapping[str, Sequence[float]]) -> Any:
    return modules.Links(
        [
            modules.OverLink(job="reviews", method=method.replace("_", "-"), link="100mbit+20ms", kinds=kinds)
            for method, kinds in of_methods.items()
        ]
    )


def test_the_time_over_a_link_is_that_of_the_steps_of_each_kind(modules: Any) -> None:
    rows = rows_of(modules)
    links = links_of(modules, none={"1000": [1.5, 2.5]}, one_bit_adam={"998": [1.5], "40": [0.25]})
    assert list(rows) == ["none", "one-bit-adam"]
    assert links.of(rows) == ["100mbit+20ms"]
    assert links.seconds(rows["none"][0], "100mbit+20ms") == [20.0, 40.0]
    assert links.seconds(rows["one-bit-adam"][0], "100mbit+20ms") == [4 * 1.5 + 6 * 0.25, 4 * 1.5 + 16 * 0.25]


def test_a_kind_that_was_not_measured_is_plain_data_parallelism_s(modules: Any) -> None:
    rows = rows_of(modules)
    links = links_of(modules, none={"1000": [1.5, 2.5]}, one_bit_adam={"40": [0.25]})
    assert links.seconds(rows["one-bit-adam"][0], "100mbit+20ms") == [4 * 2.0 + 6 * 0.25, 4 * 2.0 + 16 * 0.25]


def test_a_method_that_was_not_measured_over_a_link_has_no_time_and_no_curve_there(modules: Any) -> None:
    rows, words = rows_of(modules), modules.WORDS["en"]
    links = links_of(modules, none={"1000": [1.5, 2.5]})
    assert links.of(rows) == ["100mbit+20ms"]
    assert modules.cells(rows, links, "none", words)[-1] == "40"
    assert modules.cells(rows, links, "one-bit-adam", words)[-1] == ""
    assert modules.picture(rows, links).count("<polyline") == 3
    assert links_of(modules).of(rows) == []


def test_a_row_has_bytes_values_and_whether_the_mean_is_within_the_spread(modules: Any) -> None:
    rows = rows_of(modules)
    links = links_of(modules, none={"1000": [1.5, 2.5]}, one_bit_adam={"998": [1.5], "40": [0.25]})
    words = modules.WORDS["en"]
    assert modules.cells(rows, links, "none", words) == ["0.0", "1.0", "0.580 (0.540-0.620)", "", "40"]
    sent = 4 * 998 + 16 * 40
    assert modules.cells(rows, links, "one-bit-adam", words)[1:] == [
        f"{20_000 / sent:.1f}",
        "0.550 (0.500-0.600)",
        "yes",  # 0.55 is above the least of `none`, 0.54
        "10",
    ]
    alone = {"none": rows["none"], "one-bit-adam": rows["one-bit-adam"][:1]}
    assert modules.cells(alone, links, "one-bit-adam", words)[2] == "0.500 (one seed)"
    assert modules.heads(rows, links, words)[-1] == "100 Mbit/s and 20 ms, s"
    assert modules.heads(rows, links, modules.WORDS["zh"])[-1] == "100 Mbit/s、20 ms，秒"


def test_the_picture_has_a_panel_for_bytes_and_for_each_link(modules: Any) -> None:
    rows = rows_of(modules)
    links = links_of(modules, none={"1000": [1.5, 2.5]}, one_bit_adam={"998": [1.5], "40": [0.25]})
    picture = modules.picture(rows, links)
    assert picture.count("<polyline") == 4
    assert "accuracy over seconds of steps, 100 Mbit/s and 20 ms" in picture


PAGE = """Before.

<!-- benchmarks/compression_tables.py: reviews -->

old

<!-- end -->

<!-- benchmarks/compression_tables.py: language -->

another job's table

<!-- end -->
"""


def test_a_job_s_table_picture_and_measurements_are_written_and_another_s_stay(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "curves").mkdir()
    pages = {language: tmp_path / f"{language}.md" for language in ("en", "zh")}
    for page in pages.values():
        page.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(modules, "DOCS", tmp_path)
    monkeypatch.setattr(modules, "PAGES", pages)
    rows = rows_of(modules)
    modules.write_docs([rows], links_of(modules))
    written = pages["en"].read_text(encoding="utf-8")
    assert "another job's table" in written
    assert "old" not in written
    assert "| `one-bit-adam` | 0.0 | " in written
    measured = tmp_path / "curves" / "compression-reviews-20.json"
    assert (tmp_path / "curves" / "compression-reviews-20.svg").is_file()
    # What was measured makes the same page again; with links that were measured since it has their columns.
    modules.write_docs(*read_again(modules, [measured], []))
    assert pages["en"].read_text(encoding="utf-8") == written
    links = tmp_path / "links.json"
    of_none = {"job": "reviews", "method": "none", "link": "1gbit", "kinds": {"1000": [1.5, 2.5]}}
    of_one_bit = {"job": "reviews", "method": "one-bit-adam", "link": "1gbit", "kinds": {"40": [0.25]}}
    links.write_text(json.dumps([of_none, of_one_bit]), encoding="utf-8")
    modules.write_docs(*read_again(modules, [measured], [links]))
    assert "1 Gbit/s, s |" in pages["en"].read_text(encoding="utf-8")
    assert "| 40 |" in pages["en"].read_text(encoding="utf-8")
    modules.write_docs(*read_again(modules, [measured], []))
    assert "| 40 |" in pages["en"].read_text(encoding="utf-8")


def read_again(modules: Any, files: list[Path], links: list[Path]) -> tuple[Any, Any]:
    trained, found = modules.read(files, links)
    return modules.by_training(trained), found


def test_the_page_s_tables_are_those_of_the_measurements_beside_the_pictures(modules: Any) -> None:
    files = sorted((ROOT / "docs" / "curves").glob("compression-*.json"))
    trained, links = modules.read(files, [])
    for rows in modules.by_training(trained):
        for language, page in modules.PAGES.items():
            assert modules.section(rows, links, language) in page.read_text(encoding="utf-8")


SHAPES = "{http://www.w3.org/2000/svg}"


def ends_of_curves(picture: Path, panel: int) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Each curve of a panel: its name, what its last point reads off the axes, and what half a pixel is there.

    The first panel is over bytes, and its axis across has the powers of ten.
    """
    texts = list(ElementTree.parse(picture).iter(f"{SHAPES}text"))
    lines = list(ElementTree.parse(picture).iter(f"{SHAPES}polyline"))
    titles = [number for number, text in enumerate(texts) if " over " in (text.text or "")]
    panels = [texts[first:last] for first, last in pairwise([*titles, len(texts)])]
    own = panels[panel]

    def marks(anchor: str, axis: str) -> list[tuple[float, float]]:
        return [
            (float(text.attrib[axis]), float(text.text or "")) for text in own if text.attrib["text-anchor"] == anchor
        ]

    def along(places: list[tuple[float, float]], at: float, *, powers: bool) -> tuple[float, float]:
        """The value at a place, of an axis whose marks are there, and by how much it may be off."""
        (first, low), (last, high) = places[0], places[-1]
        share = (at - first) / (last - first)
        if powers:
            value = low * (high / low) ** share
            return value, value * ((high / low) ** abs(0.1 / (last - first)) - 1)
        return low + (high - low) * share, abs((high - low) * 0.1 / (last - first))

    named = [[text.text or "" for text in each if text.attrib["text-anchor"] == "start"][1:] for each in panels]
    before = sum(len(names) for names in named[:panel])
    for name, line in zip(named[panel], lines[before:], strict=False):
        x, y = map(float, line.attrib["points"].split()[-1].split(","))
        across = along(marks("middle", "x"), x, powers=panel == 0)
        up = along(marks("end", "y"), y + 4, powers=False)
        yield name, (across[0], up[0]), (across[1], up[1])


@pytest.mark.parametrize("job", ["reviews", "language"])
def test_the_curves_end_at_the_bytes_values_and_seconds_of_their_table(modules: Any, job: str) -> None:
    for page in modules.PAGES.values():
        text = read_part(page, modules.PART.format(job=job))
        found = re.findall(r"((?:\|.*\n)+)\n!\[.*\]\((.*)\)", text)
        assert found
        for rows, picture in found:
            _, _, *lines = ([cell.strip(" `") for cell in row[1:-1].split("|")] for row in rows.splitlines())
            cells = {line[0]: line[1:] for line in lines}
            for panel, column in enumerate([0, *range(4, len(lines[0]) - 1)]):
                ends = list(ends_of_curves(page.parent / picture, panel))
                assert [name for name, _, _ in ends] == [name for name, row in cells.items() if row[column]]
                for name, (across, up), (off_across, off_up) in ends:
                    shown, value = cells[name][column], cells[name][2].partition(" ")[0]
                    assert abs(across - float(shown)) <= off_across + 0.5 * 10 ** -len(shown.partition(".")[2])
                    assert abs(up - float(value)) <= off_up + 0.5 * 10 ** -len(value.partition(".")[2])


@pytest.mark.parametrize("job", ["reviews", "language"])
def test_the_chinese_page_has_the_english_one_s_cells(modules: Any, job: str) -> None:
    words = dict(zip(modules.WORDS["en"].values(), modules.WORDS["zh"].values(), strict=True))
    one_seed = modules.WORDS["en"]["seed"]
    english, chinese = (
        [
            [cell.strip() for cell in row.split("|")]
            for row in read_part(page, modules.PART.format(job=job)).splitlines()
            if row.startswith("| `")
        ]
        for page in modules.PAGES.values()
    )
    assert english
    for cells, theirs in zip(english, chinese, strict=True):
        ours = [words.get(cell, cell.replace(one_seed, words[one_seed])) for cell in cells]
        assert ours == theirs
