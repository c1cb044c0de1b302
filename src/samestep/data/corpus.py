"""Running text for language models: where it comes from, and which pieces of it are held out."""

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from samestep.data.package_files import locate
from samestep.data.split import check_split, split
from samestep.data.text import read_utf8
from samestep.errors import UserError, closest

# Sources by name, each called without arguments: one line each.
SOURCES = {
    "shakespeare": "samestep.data.bundled:read_shakespeare",
    "people-daily": "samestep.data.bundled:read_people_daily",
}

_SUFFIX = ".txt"
_PIECE = 2000  # characters of what is held out or trained on as one
_SHORTEST_PIECE = 100
_PIECES = 200  # at least, of a source that is long enough


@dataclass(frozen=True, kw_only=True)
class RunningText:
    """Documents to train on and held-out ones; a document is contiguous text."""

    train: Sequence[str]
    held_out: Sequence[str]


def read(source: str, where: str) -> list[str]:
    """The documents of a source: a name of the table, a .txt file, or a folder of such files in their names' order.

    `where` is the key that names it, for messages. Raises UserError where there is no such source, or it can't
    be read, or is empty.
    """
    if source in SOURCES:
        return pkgutil.resolve_name(SOURCES[source])()
    path = locate(source, where)
    texts = (read_utf8(file, nul=True) for file in _files(path, source, where))
    documents = [text for text in texts if text.strip()]
    if not documents:
        raise UserError(f"{path} has no text")
    return documents


def _files(path: Path, source: str, where: str) -> list[Path]:
    """List the files of a path, sorted. Raises UserError if there are none, or the path is not .txt."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*") if file.suffix.lower() == _SUFFIX)
        if not files:
            raise UserError(f"{where} is {source}: no {_SUFFIX} files in that folder")
        return files
    if path.suffix.lower() == _SUFFIX:
        return [path]
    if path.exists():
        raise UserError(f"{where} is {source}; use a file that ends in {_SUFFIX}, or a folder of such files")
    raise UserError(f'{where} is "{source}"; {closest(source, SOURCES)}, or a path to a {_SUFFIX} file or a folder')


def divide(documents: Sequence[str], held_out: float, where: str) -> RunningText:
    """Hold out a fraction of the documents' pieces; neighbours on the same side stay one text.

    `where` is the key of the fraction. Raises UserError where one side is empty.
    """
    if held_out == 0:
        return RunningText(train=documents, held_out=[])
    train: list[str] = []
    held: list[str] = []
    counts = [0, 0]
    size = min(_PIECE, max(_SHORTEST_PIECE, sum(map(len, documents)) // _PIECES))
    for document in documents:
        pieces = list(_pieces(document, size))
        _, chosen = split(pieces, held_out)
        on_hold = set(chosen)
        counts[0] += len(pieces) - len(on_hold)
        counts[1] += len(on_hold)
        for is_held, run in groupby(range(len(pieces)), key=on_hold.__contains__):
            (held if is_held else train).append("".join(pieces[index] for index in run))
    check_split(counts[0], counts[1], held_out, where)
    return RunningText(train=train, held_out=held)


def _pieces(document: str, size: int) -> Iterator[str]:
    """Cut a document at the first line end after `size` characters, and inside lines that are longer than that."""
    lines: list[str] = []
    so_far = 0
    for line in document.splitlines(keepends=True):
        for start in range(0, len(line), size):
            lines.append(line[start : start + size])
            so_far += len(lines[-1])
            if so_far >= size:
                yield "".join(lines)
                lines, so_far = [], 0
    if lines:
        yield "".join(lines)
