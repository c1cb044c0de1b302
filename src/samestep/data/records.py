"""Rows of any kind: JSONL, JSON, CSV, Parquet and Arrow files, folders of them, saved data sets, a hub's data sets.

A row is read by its number, whatever the number of ranks. What datasets of Hugging Face reads needs that package;
JSONL, JSON and CSV don't.
"""

import csv
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.package_files import locate
from samestep.data.text import read_utf8
from samestep.errors import UserError, one_line
from samestep.extras import need
from samestep.input_files import parse_json

Row = Mapping[str, Any]

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_LARGE = 1 << 20  # bytes of a file that are read at once


class Rows(ABC):
    """Rows by number, each with the place that messages name."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Row: ...

    @abstractmethod
    def place(self, index: int) -> str:
        """Where a row stands, such as "chats.jsonl:12"."""


def read_rows(
    source: str,
    where: str,
    *,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Rows:
    """The rows of a source: a file, a folder with files or of `save_to_disk`, or the name of a data set of a hub.

    `where` is the key that names it, for messages. `columns`: the name by which a row's value is known -> the column
    that has it. `limit`: the first rows alone. Raises UserError where the source can't be read, or has no rows.
    """
    rows = _opened(source, where, split)
    if not len(rows):
        raise UserError(f"{where} is {source}, which has no rows; use a source with at least one")
    if columns:
        _check_columns(rows, columns)
    return _Chosen(rows, columns or {}, len(rows) if limit is None else min(limit, len(rows)))


def _opened(source: str, where: str, split: str | None) -> Rows:
    """The rows of a source, all of them under their own names."""
    path = locate(source, where)
    if path.is_file():
        if split is not None:
            raise UserError(f'{where} is {source}, a file without splits; leave out split "{split}", or use a folder')
        return _of_file(path, where)
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _saved(path, split, where)
        return _of_folder(path, split, where)
    if path.suffix.lower() in READERS or not _HUB_NAME.fullmatch(source):
        raise UserError(f"{where} is {source}: there is no such file or folder")
    return _of_hub(source, split, where)


def _of_file(path: Path, where: str) -> Rows:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{where} is {path}; use a file that ends in {', '.join(READERS)}")
    return reader(path, where)


def _of_folder(folder: Path, split: str | None, where: str) -> Rows:
    """The rows of a folder's files in their names' order; with a split, of those whose names begin with it."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise UserError(f"{where} is {folder}: no file in that folder ends in {', '.join(READERS)}")
    fitting = [file for file in files if split is None or re.match(rf"{re.escape(split)}([-_.]|$)", file.name)]
    if not fitting:
        names = ", ".join(file.name for file in files[:6])
        raise UserError(f'{where} is {folder}: no file there is of split "{split}"; the files are {names}')
    return _Joined([_of_file(file, where) for file in fitting])


class _JsonLines(Rows):
    """A JSON object a line. Only the places of the lines are in memory."""

    def __init__(self, path: Path, where: str) -> None:
        self._path = path
        self._starts, self._lines = _line_starts(path)  # of the lines that aren't blank
        self._size = path.stat().st_size

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, index: int) -> str:
        return f"{self._path}:{self._lines[index] + 1}"

    def __getitem__(self, index: int, /) -> Row:
        line = int(self._lines[index])
        start, stop = int(self._starts[line]), int(self._starts[line + 1])
        # A descriptor of its own: loading processes would share the position of an inherited one.
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            raw = os.pread(descriptor, stop - start, start)
        finally:
            os.close(descriptor)
        try:
            row = parse_json(raw.decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.place(index)}: the line is not UTF-8 ({error.reason}); save the file so"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.place(index)}: the line is not JSON ({error}); use an object a line") from None
        return _object(row, self.place(index))


def _line_starts(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each line of a file begins, and the end of the file, [lines + 1]; and the lines that aren't blank."""
    ends: list[NDArray[np.int64]] = []
    position = 0
    with path.open("rb") as stream:
        while block := stream.read(_LARGE):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + position)
            position += len(block)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *(end + 1 for end in ends)])
    if starts[-1] != position:
        starts = np.append(starts, position)
    # A line of a byte or two may be blank; longer ones that are get an error of their own.
    short = np.flatnonzero(np.diff(starts) <= _SHORT)
    with path.open("rb") as stream:
        blank = [line for line in short.tolist() if not _line(stream, starts, line).strip()]
    return starts, np.setdiff1d(np.arange(len(starts) - 1), np.array(blank, dtype=np.int64))


_SHORT = 8  # bytes of a line that is looked at for whether it is blank


def _line(stream: Any, starts: NDArray[np.int64], line: int) -> bytes:
    stream.seek(int(starts[line]))
    return stream.read(int(starts[line + 1] - starts[line]))


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{place} is a {type(row).__name__}; a row must be an object with names, such as messages")
    return row


class _Listed(Rows):
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row], places: Sequence[str]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return self._rows[index]

    def place(self, index: int) -> str:
        return self._places[index]


def _json_array(path: Path, where: str) -> Rows:
    """A file with one JSON array of objects; or with an object a line, as many files of that name have."""
    text = read_utf8(path)
    if not text.lstrip().startswith("["):
        return _JsonLines(path, where)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}; use an array of objects, or an object a line") from None
    places = [f"{path} row {number}" for number in range(len(values))]
    return _Listed([_object(value, place) for value, place in zip(values, places, strict=True)], places)


def _csv(path: Path, where: str) -> Rows:
    """A CSV file with a header."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(read_utf8(path).splitlines(keepends=True))
    try:
        header = next(reader, [])
        rows: list[Row] = []
        places: list[str] = []
        for cells in reader:
            place = f"{path}:{reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise UserError(f"{place} has {len(cells)} columns, and the header {len(header)}")
            rows.append(dict(zip(header, cells, strict=True)))
            places.append(place)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is not CSV: {error}") from None
    return _Listed(rows, places)


class _DataSet(Rows):
    """A data set of Hugging Face's `datasets`, memory-mapped; its own split over ranks is not used."""

    def __init__(self, data: Any, name: str) -> None:
        self._data, self._title = data, name

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> Row:
        return self._data[index]

    def place(self, index: int) -> str:
        return f"{self._title} row {index}"


def _parquet(path: Path, where: str) -> Rows:
    datasets = _datasets(f"{where}: a Parquet file")
    return _DataSet(_read(lambda: datasets.Dataset.from_parquet(str(path)), path, where), str(path))


def _arrow(path: Path, where: str) -> Rows:
    datasets = _datasets(f"{where}: an Arrow file")
    return _DataSet(_read(lambda: datasets.Dataset.from_file(str(path)), path, where), str(path))


def _saved(folder: Path, split: str | None, where: str) -> Rows:
    """The rows of a folder of `save_to_disk`."""
    datasets = _datasets(f"{where}: a saved data set")
    data = _read(lambda: datasets.load_from_disk(str(folder)), folder, where)
    return _DataSet(_of_split(data, split, str(folder), where), str(folder))


def _of_hub(name: str, split: str | None, where: str) -> Rows:
    """The rows of a hub's data set, as `datasets` fetches and keeps it."""
    datasets = _datasets(f"{where}: {name} is no file or folder here, and a hub's data set")
    data = _read(lambda: datasets.load_dataset(name), name, where)
    return _DataSet(_of_split(data, split, name, where), name)


def _of_split(data: Any, split: str | None, name: str, where: str) -> Any:
    """The one split of a data set, or the one that was asked for."""
    if not isinstance(data, Mapping):
        if split is not None:
            raise UserError(f'{where} is {name}, which has no splits; leave out split "{split}"')
        return data
    if split is None and len(data) == 1:
        return next(iter(data.values()))
    if split not in data:
        advice = "of which split must name one" if split is None else f'and none is called "{split}"'
        raise UserError(f"{where} is {name}, which has the splits {', '.join(data)}, {advice}")
    return data[split]


def _datasets(what: str) -> Any:
    """Hugging Face's `datasets`, without its bars."""
    need(what, "datasets")
    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    return datasets


def _read(read: Callable[[], Any], source: Any, where: str) -> Any:
    """What `datasets` reads. Raises UserError where it can't: it raises errors of many kinds."""
    try:
        return read()
    except Exception as error:
        cause: BaseException = error.__cause__ or error
        raise UserError(
            f"{where} is {source}, which datasets can't read: {type(cause).__name__}: {one_line(cause)}"
        ) from error


class _Joined(Rows):
    """The rows of several sources, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> Row:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]

    def place(self, index: int) -> str:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part].place(index - self._starts[part])


class _Chosen(Rows):
    """The first rows of others, with columns under other names."""

    def __init__(self, rows: Rows, columns: Mapping[str, str], length: int) -> None:
        self._rows, self._columns, self._length = rows, columns, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(index)
        row = self._rows[index]
        if not self._columns:
            return row
        for column in self._columns.values():
            if column not in row:
                raise missing_column(column, row, self.place(index))
        others = {name: value for name, value in row.items() if name not in self._columns.values()}
        return {**others, **{name: row[column] for name, column in self._columns.items()}}

    def place(self, index: int) -> str:
        return self._rows.place(index)


def _check_columns(rows: Rows, columns: Mapping[str, str]) -> None:
    first = rows[0]
    for name, column in columns.items():
        if column not in first:
            raise UserError(
                f'recipe.data.columns.{name} is "{column}", and {rows.place(0)} has no such column; it has '
                f"{', '.join(map(str, first))}"
            )


def missing_column(column: str, row: Row, place: str) -> UserError:
    """The error for a row that lacks a column that others have."""
    has = ", ".join(map(str, row)) or "none"
    return UserError(
        f'{place} has no column "{column}" (it has {has}), which the first row has; add it, or remove the row'
    )


# How files are read, by the ends of their names.
READERS: Mapping[str, Callable[[Path, str], Rows]] = {
    ".jsonl": _JsonLines,
    ".json": _json_array,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
