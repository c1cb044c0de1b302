"""Messages and outputs that the documentation shows, and what `shown_messages.yaml` says about each of them."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "samestep"
# The Chinese pages have the same blocks: tests/test_docs.py.
PAGES = (
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md") if "zh" not in page.parts),
)

_BLOCK = re.compile(r"^```(?:text)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PREFIX = re.compile(r"^samestep(?:\.errors\.\w+)?: ")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_PLACE = re.compile(r"[\w/.\\-]+\.py:\d+")


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A message or an output that no test of the pages produces."""

    begins: str  # with what: a line of a block of messages, or the first line of another block
    why: str
    says: Sequence[str] = ()  # what it says, and a literal of the source as well; `*` stands for a value
    source: Sequence[str] = ()  # files with these literals, below src/samestep, examples/ or benchmarks/
    test: str | None = None  # the test that produces it, "FILE::NAME"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is known of the messages and outputs of one page."""

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # first words -> beginning -> other words
    compared: Mapping[str, str] = field(default_factory=dict)  # beginning -> the test that compares it with the page
    inputs: Sequence[str] = ()  # beginnings of blocks that a user writes, and of formulas
    not_run: Sequence[NotRun] = ()
    quoted: Mapping[str, Sequence[str]] = field(default_factory=dict)  # in a sentence -> files with these literals


def _rows_of(values: Mapping[str, Any]) -> Rows:
    not_run = [NotRun(**{"begins": begins, **value}) for begins, value in values.get("not_run", {}).items()]
    return Rows(**{**values, "not_run": not_run})


ROWS: Mapping[str, Rows] = {
    page: _rows_of(values)
    for page, values in yaml.safe_load((ROOT / "tests" / "shown_messages.yaml").read_text(encoding="utf-8")).items()
}


def _blocks(page: str) -> list[str]:
    return _BLOCK.findall(_without_other_blocks((ROOT / page).read_text(encoding="utf-8")))


def _without_other_blocks(text: str) -> str:
    return re.sub(r"^```(?!text$)\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def messages(page: str) -> list[str]:
    """Each line of the blocks of messages, which begin with "samestep: " or with an error's class, without that."""
    return [_PREFIX.sub("", line) for block in _blocks(page) if _PREFIX.match(block) for line in block.splitlines()]


def outputs(page: str) -> list[str]:
    """Blocks of other text."""
    return [block for block in _blocks(page) if not _PREFIX.match(block)]


def masked(text: str) -> str:
    """A text without its numbers, the places in files, and what alignment adds."""
    text = _NUMBER.sub("#", _PLACE.sub("FILE:#", text))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return re.sub(r"([┏┳┓┡╇┩┌┬┐├┼┤└┴┘])[━─]+", r"\1", "\n".join(lines))


def is_shown(page: str, text: str) -> bool:
    """Whether a page shows a message or a whole output as it was printed, but for its numbers."""
    return masked(text) in {masked(each) for each in (*messages(page), *outputs(page))}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _tests_of(place: str) -> Iterator[ast.FunctionDef]:
    file, _, name = place.partition("::")
    path = ROOT / "tests" / file
    if path.is_file():
        yield from (each for each in _tree(path).body if isinstance(each, ast.FunctionDef) and each.name == name)


def is_a_test(place: str, *, of_page: str | None = None) -> bool:
    """Whether there is such a test, in a file that names the page."""
    return any(_tests_of(place)) and (
        of_page is None
        or re.search(
            rf'"({of_page}|{Path(of_page).name})"',
            (ROOT / "tests" / place.partition("::")[0]).read_text(encoding="utf-8"),
        )
        is not None
    )


@cache
def literals(file: str) -> tuple[str, ...]:
    """The texts of a file of the source, without docstrings: of each f-string the pieces between its values."""
    nodes = [*ast.walk(_tree((ROOT if file.startswith(("examples/", "benchmarks/")) else SOURCE) / file))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return tuple(text.value for text in texts if isinstance(text.value, str))


def missing_pieces(row: NotRun) -> list[str]:
    """What a row says that no literal of its source has."""
    known = [text for file in row.source for text in literals(file)]
    pieces = [piece.strip() for says in row.says for piece in says.split("*")]
    return [piece for piece in pieces if not any(piece in text for text in known)]


def says(shown: str, row: NotRun) -> bool:
    """Whether what a page shows has all that its row says."""
    shown = " ".join(shown.split())
    return all(re.search(".*".join(map(re.escape, each.split("*"))), shown) is not None for each in row.says)
