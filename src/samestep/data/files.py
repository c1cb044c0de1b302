"""A user's own labelled texts: JSON lines or CSV with the columns text and label."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samestep.data.texts import Label, LabelledTexts
from samestep.errors import UserError

_COLUMNS = ("text", "label")


def read_jsonl(path: Path) -> LabelledTexts:
    """Read a file with one object a line, such as {"text": "...", "label": "..."}.

    Raises UserError with file and line for what is wrong in it.
    """
    return _collect(path, _json_records(path))


def read_csv(path: Path) -> LabelledTexts:
    """Read a file whose first line names its columns. Labels are integers where every one of them is.

    Raises UserError with file and line for what is wrong in it.
    """
    found = _collect(path, _csv_records(path))
    if not all(_is_integer(str(label)) for label in found.labels):
        return found
    labels = [int(label) for label in found.labels]
    return LabelledTexts(origin=found.origin, texts=found.texts, labels=labels, lines=found.lines)


def read_utf8(path: Path) -> str:
    """A file's text. Raises UserError where it is not there, can't be read, or is not UTF-8."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no data file {path}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {error.start} is {content[error.start]:#x}; save it as UTF-8"
        ) from None


def _json_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not splitlines: a JSON string may hold other characters that count as line ends there.
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(record, dict):
            raise UserError(f'{path}:{number}: {_shown(line)} is no object; {{"text": ..., "label": ...}} would do')
        _check_columns(f"{path}:{number}", record)
        yield number, record


def _csv_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # strict: otherwise a quote that is never closed swallows the rest of the file.
    rows = csv.reader(io.StringIO(read_utf8(path), newline=""), strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for row in rows:
            if header is None:
                header = [name.strip() for name in row]
                _check_columns(f"{path}:{number}", dict.fromkeys(header))
            elif row:
                if len(row) != len(header):
                    raise UserError(
                        f"{path}:{number}: {len(row)} fields in a file of {len(header)} columns; "
                        f"a text with a comma must stand in double quotes"
                    )
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1  # a quoted text may run over several lines
    except csv.Error as error:
        raise UserError(f"{path}:{number}: not CSV: {error}") from None


def _collect(path: Path, records: Iterator[tuple[int, Mapping[str, Any]]]) -> LabelledTexts:
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
                f"{_kind(labels[0])}; either would do, for all"
            )
        lines.append(number)
    if not texts:
        raise UserError(f"{path} has no samples")
    return LabelledTexts(origin=str(path), texts=texts, labels=labels, lines=lines)


def _check_columns(place: str, there: Mapping[str, Any]) -> None:
    missing = [name for name in _COLUMNS if name not in there]
    if missing:
        raise UserError(
            f"{place}: no {' and no '.join(missing)}; there: {', '.join(map(str, there)) or 'nothing'}. "
            f"Rename yours to {' and '.join(missing)}"
        )


def _text(place: str, value: Any) -> str:
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
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f"{place}: label is {_shown(value)}; it must be a string or an integer")
    if value == "":
        raise UserError(f"{place}: label is empty; give it one, or remove the sample")
    return value


def _kind(label: Label) -> str:
    return "a string" if isinstance(label, str) else "an integer"


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return len(text) < 19 and digits.isascii() and digits.isdecimal() and str(int(text)) == text


def _shown(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
