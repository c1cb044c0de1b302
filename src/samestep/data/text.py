"""Labelled texts: what a source gives, readers of a user's own files, and the class numbers of labels.

Sources by name and readers by suffix stand in two tables, a line each. A reader in a module of its own takes
`read_utf8`, `check_columns`, `collect_records` and `integer_labels` from here.
"""

import csv
import io
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.data.package_files import locate
from samestep.errors import UserError, closest
from samestep.input_files import parse_json, text_of

Label = str | int


@dataclass(frozen=True, kw_only=True)
class LabelledTexts:
    """Texts and their labels, in the source's order."""

    origin: str  # what messages call the source
    texts: Sequence[str]
    labels: Sequence[Label]
    lines: Sequence[int] | None = None  # line of each text in the file `origin`
    names: tuple[str, ...] | None = None  # the classes in their order, where the source fixes it

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Where a sample stands, for a message."""
        return f"{self.origin}:{self.lines[index]}" if self.lines else f"{self.origin}, sample {index + 1}"


def once_each(pairs: Iterable[tuple[str, str]], shortest: int = 1) -> dict[str, str]:
    """Keep each text once, with its label; drop texts that are too short, or have two labels.

    A text on both sides of a split would let a model score by memorizing it.
    """
    labels: dict[str, set[str]] = {}
    for text, label in pairs:
        if len(text) >= shortest:
            labels.setdefault(text, set()).add(label)
    return {text: own.pop() for text, own in labels.items() if len(own) == 1}


_COLUMNS = ("text", "label")

_LONGEST_HEADER = 10_000  # characters in which the names of columns are looked for
_LONGEST_TEXT = 2**28  # characters of one field; Python's csv takes 131,072 unless it is told

# Names of separators, and the suffix of files that have them, if there is one.
_SEPARATORS: Mapping[str, tuple[str, str | None]] = {
    ",": ("comma", ".csv"),
    "\t": ("tab", ".tsv"),
    ";": ("semicolon", None),
    "|": ("bar", None),
}


def read_jsonl(path: Path) -> LabelledTexts:
    """Read a file with one object a line, such as {"text": "...", "label": "..."}.

    Raises UserError with file and line for what is wrong in it.
    """
    return collect_records(path, _json_records(path))


def read_csv(path: Path) -> LabelledTexts:
    """Read a file whose first line names its columns. Labels are integers where every one of them is.

    Raises UserError with file and line for what is wrong in it.
    """
    return integer_labels(collect_records(path, _separated_records(path, ",", "comma")))


def read_tsv(path: Path) -> LabelledTexts:
    """Read a file as `read_csv` does, with tabs between its fields, and quotes as spreadsheets and pandas write them.

    Raises UserError with file and line for what is wrong in it.
    """
    return integer_labels(collect_records(path, _separated_records(path, "\t", "tab")))


def read_utf8(path: Path, *, nul: bool = False) -> str:
    """A file's text, its ends of lines as they are. Raises UserError where it can't be read, or is not UTF-8.

    `nul`: the character NUL is taken, as any other of running text.
    """
    return text_of(path, missing=f"no data file {path}", expected="a data file", most=None, newlines=False, nul=nul)


def _json_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and object of each line of a JSONL file."""
    # Not splitlines: a JSON string may hold other characters that count as line ends there.
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, object_pairs_hook=lambda pairs, place=f"{path}:{number}": _once(place, pairs))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(record, dict):
            raise UserError(f'{path}:{number}: {_shown(line)} is no object; use {{"text": ..., "label": ...}}')
        check_columns(f"{path}:{number}", record)
        yield number, record


def _once(place: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a line. Raises UserError for a key of a sample that stands twice, of which one would be lost."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in _COLUMNS if names.count(name) > 1), None):
        raise UserError(f"{place}: {twice} stands {names.count(twice)} times; keep one of them")
    return dict(pairs)


def _separated_records(path: Path, separator: str, called: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields by column of each row of a CSV or TSV file."""
    content = read_utf8(path)
    _check_separator(path, content, separator)
    # strict: otherwise a quote that is never closed swallows the rest of the file.
    rows = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        while (row := _next(rows)) is not None:
            if header is None:
                header = [name.strip() for name in row]
                _check_header(f"{path}:{number}", header, separator)
            elif row:
                if len(row) != len(header):
                    fields = f"{len(row)} field{'s' * (len(row) != 1)} in a file of {len(header)} columns"
                    quotes = f"a text with a {called} must stand in double quotes"
                    too_few = f"put a {called} and what is missing there, or remove the line"
                    raise UserError(f"{path}:{number}: {fields}; {too_few if len(row) < len(header) else quotes}")
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1  # a quoted text may run over several lines
    except csv.Error as error:
        if rows.line_num and "field larger" in str(error):
            raise UserError(f"{path}:{number}: a text has over {_LONGEST_TEXT:,} characters; shorten it") from None
        if (opened := _unclosed_quote(content, separator)) is not None:
            raise UserError(f"{path}:{opened}: a double quote opens a text here, and none closes it") from None
        why = str(error).replace(f"'{separator}'", f"a {called}")
        raise UserError(
            f"{path}:{number}: not {path.suffix[1:].upper()}: {why}; a text that begins with a double quote must "
            "stand in double quotes, and its own be doubled"
        ) from None


def _check_header(place: str, header: Sequence[str], separator: str) -> None:
    """Raise UserError for a column that stands twice, of which one would be lost, and for a file without a header."""
    if twice := next((name for name in _COLUMNS if header.count(name) > 1), None):
        raise UserError(f"{place}: the column {twice} stands {header.count(twice)} times; rename all but one")
    try:
        check_columns(place, dict.fromkeys(header))
    except UserError as error:
        if {name.lower() for name in header} & set(_COLUMNS) or len(header) != len(_COLUMNS):
            raise
        first = separator.join(_COLUMNS).replace("\t", "TAB")
        raise UserError(f"{error}, or put a first line {first} above this one, if it is a sample") from None


def _next(rows: Any) -> list[str] | None:
    """The next row; None after the last. A field's limit is of the whole process, so it is set for this alone."""
    before = csv.field_size_limit(_LONGEST_TEXT)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(before)


def _check_separator(path: Path, content: str, separator: str) -> None:
    """Raise UserError where the first line names the columns, but between others than this format's separator."""
    first = content[:_LONGEST_HEADER].lstrip("\r\n").partition("\n")[0].partition("\r")[0]
    if re.fullmatch('"?sep=.?"?', first):
        raise UserError(f"{path}:1: {first} is a line for Excel alone; remove it")
    put = f"put {_SEPARATORS[separator][0]}s there"
    for other, (name, suffix) in _SEPARATORS.items():
        columns = {column.strip().strip('"') for column in first.split(other)}
        if other != separator and columns >= set(_COLUMNS):
            instead = put if suffix is None else f"name it {path.stem}{suffix}, or {put}"
            raise UserError(f"{path}:1: the columns seem to be separated by {name}s; {instead}")


def _unclosed_quote(content: str, separator: str) -> int | None:
    """The line of a double quote that begins a text and has no end; None where all have one."""
    opened, line, begins, place = None, 1, True, 0
    while place < len(content):
        letter = content[place]
        if opened is None:
            if letter == '"' and begins:
                opened = line
            begins = letter in (separator, "\n", "\r")
        elif letter == '"':
            if content[place + 1 : place + 2] == '"':
                place += 1
            else:
                opened, begins = None, False
        if letter == "\n" or (letter == "\r" and content[place + 1 : place + 2] != "\n"):
            line += 1
        place += 1
    return opened


def collect_records(path: Path, records: Iterable[tuple[int, Mapping[str, Any]]]) -> LabelledTexts:
    """Collect the texts and labels of records, each given as its first line and its columns by name.

    The reader has checked the names of columns, where its format has any (`check_columns`). Raises UserError with
    file and line for an invalid text or label, for labels of two types, and for a file without records.
    """
    texts: list[str] = []
    labels: list[Label] = []
    lines: list[int] = []
    for number, record in records:
        place = f"{path}:{number}"
        texts.append(_text(place, record["text"]))
        labels.append(_label(place, record["label"]))
        if type(labels[-1]) is not type(labels[0]):
            raise UserError(
                f"{place}: label {labels[-1]!r} is {_kind(labels[-1])}, but the first one, {labels[0]!r}, is "
                f"{_kind(labels[0])}; use either, for all"
            )
        lines.append(number)
    if not texts:
        raise UserError(f"{path} has no samples")
    return LabelledTexts(origin=str(path), texts=texts, labels=labels, lines=lines)


def integer_labels(samples: LabelledTexts) -> LabelledTexts:
    """Convert labels to integers if every label is one; for formats in which all fields are text."""
    if not all(_is_integer(str(label)) for label in samples.labels):
        return samples
    return replace(samples, labels=[int(label) for label in samples.labels])


def check_columns(place: str, there: Mapping[str, Any]) -> None:
    """Raise UserError if the columns `there` lack text or label. `place`: file and line."""
    missing = [name for name in _COLUMNS if name not in there]
    if missing:
        raise UserError(
            f"{place}: no {' and no '.join(missing)}; there: {', '.join(map(str, there)) or 'nothing'}. "
            f"Rename yours to {' and '.join(missing)}"
        )


def _text(place: str, value: Any) -> str:
    """A record's text. Raises UserError for one that is none, empty, or not encodable."""
    if not isinstance(value, str):
        raise UserError(f"{place}: text is {_shown(value)}; it must be a string")
    if not value.strip():
        raise UserError(f"{place}: text is empty; give it one, or remove the sample")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: text has half a surrogate pair at character {error.start}") from None
    return value


def _label(place: str, value: Any) -> Label:
    """A record's label, a string or an integer."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f"{place}: label is {_shown(value)}; it must be a string or an integer")
    if value == "":
        raise UserError(f"{place}: label is empty; give it one, or remove the sample")
    return value


def _kind(label: Label) -> str:
    return "a string" if isinstance(label, str) else "an integer"


def _is_integer(text: str) -> bool:
    """Whether a text is an integer in canonical form, of at most 18 digits."""
    digits = text.removeprefix("-")
    return len(text) < 19 and digits.isascii() and digits.isdecimal() and str(int(text)) == text


def _shown(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# Called without arguments.
SOURCES = {
    "reviews": "samestep.data.bundled:read_reviews",
    "debian-packages": "samestep.data.bundled:read_debian_packages",
}

# Called with the path.
READERS = {
    ".jsonl": "samestep.data.text:read_jsonl",
    ".csv": "samestep.data.text:read_csv",
    ".tsv": "samestep.data.text:read_tsv",
}


def known_suffixes() -> str:
    """The suffixes that can be read, for a message: .a, .b or .c."""
    *others, last = READERS
    return f"{', '.join(others)} or {last}" if others else last


def read_source(source: str, where: str) -> LabelledTexts:
    """Read a source: a name of the table, or a path. `where` is the key that names it, for messages.

    Raises UserError where there is no such source, or it can't be read.
    """
    if source in SOURCES:
        return pkgutil.resolve_name(SOURCES[source])()
    path = locate(source, where)
    if (reader := READERS.get(path.suffix.lower())) is not None:
        return pkgutil.resolve_name(reader)(path)
    if path.exists():
        raise UserError(f"{where} is {source}; use a file that ends in {known_suffixes()}")
    raise UserError(f'{where} is "{source}"; {closest(source, SOURCES)}, or a path to a {known_suffixes()} file')


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes in their order, and where they come from (for messages)."""

    names: tuple[str, ...]
    said_by: str

    def numbers(self, samples: LabelledTexts) -> list[int]:
        """Return the class number of each sample. Raises UserError with the place of an unknown label."""
        by_label = self._by_label()
        try:
            return [by_label[label] for label in samples.labels]
        except KeyError:
            wrong = next(index for index, label in enumerate(samples.labels) if label not in by_label)
            raise UserError(self._unknown(samples.place(wrong), samples.labels[wrong])) from None

    def _by_label(self) -> dict[Label, int]:
        """Map labels to class numbers: names, and integers as numbers of classes unless the names are integers."""
        by_name: dict[Label, int] = {name: number for number, name in enumerate(self.names)}
        if all(name.isdecimal() for name in self.names):
            return by_name | {int(name): number for number, name in enumerate(self.names)}
        return by_name | {number: number for number in range(len(self.names))}

    def _unknown(self, place: str, label: Label) -> str:
        if isinstance(label, str):
            return f'{place}: label "{label}" is not in {self.said_by}; {closest(label, self.names)}'
        return (
            f"{place}: label {label} is out of range of the {len(self.names)} classes that "
            f"{self.said_by} has; use 0 to {len(self.names) - 1}"
        )


def find_classes(samples: LabelledTexts, classes: Sequence[str] | None, where: str) -> Classes:
    """Return the classes of a training file: `classes`, from the key `where`, or else those of its labels.

    Raises UserError for fewer than two classes, and for integers that can't be class numbers.
    """
    distinct = set(samples.labels)
    if len(distinct) < 2:
        raise UserError(f"{samples.origin}: every label is {samples.labels[0]!r}; at least two classes are needed")
    if classes is not None:
        return Classes(names=tuple(classes), said_by=where)
    names = samples.names or _names(samples)
    return Classes(names=names, said_by=f"the labels of {samples.origin}")


def _names(samples: LabelledTexts) -> tuple[str, ...]:
    """Derive class names from labels: 0 to the largest integer, or the sorted strings."""
    integers = [label for label in samples.labels if isinstance(label, int)]
    if not integers:
        return tuple(sorted({str(label) for label in samples.labels}))
    lowest, highest = min(integers), max(integers)
    if lowest < 0:
        place = samples.place(samples.labels.index(lowest))
        raise UserError(f"{place}: label {lowest} is below 0; integer labels are classes, counted from 0")
    if highest >= len(samples):
        place = samples.place(samples.labels.index(highest))
        raise UserError(
            f"{place}: label {highest} would make {highest + 1} classes for {len(samples)} samples; "
            f"integer labels are classes, counted from 0"
        )
    return tuple(str(number) for number in range(highest + 1))
