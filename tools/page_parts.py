"""Parts of the documentation's pages that commands write: what stands between two marks.

`<!-- name -->` begins a part and `<!-- end -->` or `<!-- /name -->` ends it. Around its text stand blank lines.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Write texts into a page, each by the name of its part. Raises SystemExit for a part that the page hasn't."""
    text = page.read_text(encoding="utf-8")
    for name, new in parts.items():
        place, marks = _part(text, name, page)
        text = f"{text[: place.start()]}{marks[0]}\n{new}\n\n{marks[1]}{text[place.end() :]}"
    page.write_text(text, encoding="utf-8")


def read_part(page: Path, name: str) -> str:
    """What stands in a part of a page, without the blank lines around it. Raises SystemExit as `write_parts`."""
    place, marks = _part(page.read_text(encoding="utf-8"), name, page)
    return place[0].removeprefix(marks[0]).removesuffix(marks[1]).strip("\n")


def _part(text: str, name: str, page: Path) -> tuple[re.Match[str], tuple[str, str]]:
    """Where a part stands with its marks, and these."""
    found = list(
        re.finditer(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- (?:end|/{re.escape(name)}) -->)", text, re.DOTALL)
    )
    if len(found) != 1:
        raise SystemExit(f"{page} has {len(found)} parts <!-- {name} --> ... <!-- end -->; one is wanted")
    return found[0], (found[0][1], found[0][2])


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown, the first `left` columns to the left and the others to the right."""
    lines = [titles, [*["---"] * left, *["--:"] * (len(titles) - left)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
