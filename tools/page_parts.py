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
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- (?:end|/{re.escape(name)}) -->)", re.DOTALL)
        if len(found := place.findall(text)) != 1:
            raise SystemExit(f"{page} has {len(found)} parts <!-- {name} --> ... <!-- end -->; one is wanted")
        text = place.sub(lambda marks, new=new: f"{marks[1]}\n{new}\n\n{marks[2]}", text)
    page.write_text(text, encoding="utf-8")


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown, the first `left` columns to the left and the others to the right."""
    lines = [titles, [*["---"] * left, *["--:"] * (len(titles) - left)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
