"""Parts of the documentation's pages that commands write: what stands between two marks.

`<!-- name -->` begins a part and `<!-- end -->` or `<!-- /name -->` ends it. Around its text stand blank lines.

`MeasuredTable` is such a part in both languages whose measurements are kept as JSON in benchmarks/measured, with the
command, the day and the machine. The test in tests/test_measured_tables.py makes every table again from its file.
"""

import datetime
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
NOTES = {
    "en": "Measured {on}with PyTorch {torch} on {cores} cores: `{command}`.",
    "zh": "{on}在 {cores} 个核上用 PyTorch {torch} 测量：`{command}`。",
}
# Of figures that were in the page before there was a command that keeps them; the file says where they are from.
NOTES_OF_COPIED = {
    "en": "Measured {on}with PyTorch {torch} on {cores} cores. To measure and write it again: `{command}`.",
    "zh": "{on}在 {cores} 个核上用 PyTorch {torch} 测量。重新测量并写入：`{command}`。",
}
DAYS = {"en": "on {date} ", "zh": "{date} "}


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


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "lr") -> str:
    """A table in Markdown. `align` has a letter a column (l, r, c), of which the last one counts for all others."""
    letters = align + align[-1] * (len(titles) - len(align))
    marks = {"l": "---", "r": "--:", "c": ":-:"}
    lines = [titles, [marks[letter] for letter in letters[: len(titles)]], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """A table of measurements in a page and its twin, and the file that keeps what was measured."""

    name: str  # of the file, without .json
    part: str  # of the pages
    page: str  # in English, from the root
    text: Callable[[Any, str], str]  # the table, of a result and in a language
    dated_rows: bool = False  # each row has a day of its own, so the note below has none

    @property
    def file(self) -> Path:
        return MEASURED / f"{self.name}.json"

    @property
    def pages(self) -> Mapping[str, Path]:
        if self.page == "README.md":
            return {"en": ROOT / self.page, "zh": ROOT / "README.zh-CN.md"}
        return {"en": ROOT / self.page, "zh": ROOT / "docs" / "zh" / Path(self.page).relative_to("docs")}

    def keep(self, result: Any, **known: Any) -> None:
        """Keep what was measured, and write the table. `known`: circumstances that aren't those of this command."""
        kept = {"measured": {**circumstances(), **known}, "result": result}
        self.file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.write()

    def kept(self) -> Any:
        """The result in the file."""
        return json.loads(self.file.read_text(encoding="utf-8"))["result"]

    def section(self, language: str) -> str:
        """The table made of the file, and below it the day, the machine and the command."""
        kept = json.loads(self.file.read_text(encoding="utf-8"))
        notes = NOTES_OF_COPIED if "copied_from" in kept["measured"] else NOTES
        on = "" if self.dated_rows else DAYS[language].format(**kept["measured"])
        return f"{self.text(kept['result'], language)}\n\n{notes[language].format(**kept['measured'], on=on)}"

    def write(self) -> None:
        for language, page in self.pages.items():
            write_parts(page, {self.part: self.section(language)})


def circumstances() -> dict[str, Any]:
    """When, where and by which command something is measured."""
    program = Path(sys.argv[0]).resolve()
    shown = program.relative_to(ROOT).as_posix() if program.is_relative_to(ROOT) else program.name
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": version("torch").partition("+")[0],
        "cores": len(os.sched_getaffinity(0)),
        "command": shlex.join(["python", shown, *without_json(sys.argv[1:])]),
    }


def without_json(words: Sequence[str]) -> list[str]:
    """A command's words without `--json FILE`: a reader of the page needs no file of the one who measured."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--json" not in (before, word) and not word.startswith("--json=")
    ]
