"""`checkpoint.json`: what a checkpoint is, with the sums of its other files and of itself.

Format 2 ends in a line with the SHA-256 of all bytes before it, so that no byte of the file changes unnoticed. Format
1, of earlier versions, has no such line. The values of both are held against one schema, `Info`.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError

from samestep.checkpoint.compatibility import Base
from samestep.checkpoint.identity import Identity
from samestep.checkpoint.plain_files import read_plain
from samestep.errors import CheckpointError
from samestep.run_folder import INFO_FILE, lies_within, step_of

FORMAT = 2
_WITHOUT_SUM = 1  # the format whose file has no sum of itself

_MOST_BYTES = 1 << 26  # of the file
_MOST_DEEP = 200  # sections in sections
_MOST_STEPS = 10**15 - 1  # as many digits as a checkpoint's name has
_MOST_PROCESSES = 1 << 20
_TOO_DEEP = f"its sections are nested more than {_MOST_DEEP} deep"
_SUM = re.compile(r"[0-9a-f]{64}")


def _is_sum(text: str) -> str:
    """Raise ValueError unless a text is a SHA-256."""
    if not _SUM.fullmatch(text):
        raise ValueError("it is no SHA-256")
    return text


def _is_inside(files: Mapping[str, "FileSum"]) -> Mapping[str, "FileSum"]:
    """Raise ValueError for the sum of a file outside of the checkpoint's folder."""
    if outside := [name for name in files if not lies_within(name)]:
        raise ValueError(f"it has a sum of {outside[0]!r}, outside of its folder")
    return files


def _is_recipe(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ValueError for what no recipe is; its other keys are those of the version that saved it."""
    if not isinstance(recipe.get("task", ""), str):
        raise ValueError("its task is no text")
    for section in ("data", "model", "args"):
        if not isinstance(recipe.get(section, {}), Mapping):
            raise ValueError(f"its {section} is no section of keys and values")
    return recipe


_Text = Annotated[str, Strict()]
_Number = Annotated[float, Strict()]  # also NaN and infinity, which metrics may be
_Step = Annotated[int, Strict(), Ge(0), Le(_MOST_STEPS)]


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Size and checksum of a checkpoint's file, taken when it was written."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    bytes: Annotated[int, Strict(), Ge(0), Le(2**63 - 1)]
    sha256: Annotated[str, Strict(), AfterValidator(_is_sum)]


@dataclass(frozen=True, kw_only=True)
class Info:
    """The contents of `checkpoint.json`: the progress of the training, and the job that saved it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: _Step  # optimizer steps taken; the next step has this number, counted from 0
    epoch: _Step | None  # None where epochs are not counted
    layout: _Text
    processes: Annotated[int, Strict(), Ge(0), Le(_MOST_PROCESSES)]
    engine: _Text
    recipe: Annotated[
        Mapping[_Text, Any], AfterValidator(_is_recipe)
    ]  # as in the job file; empty for a custom training loop
    scaler: Mapping[str, _Number] = field(default_factory=dict)  # state of the loss scaler, under fp16
    metrics: Mapping[str, _Number] = field(default_factory=dict)  # of the evaluation after this step
    extra: Mapping[str, Any] = field(default_factory=dict)  # values that a custom training loop saved along
    base: Base | None = None  # the frozen parameters that are left out; None: none are
    identity: Identity | None = None  # of the data and the code; None: not known
    tied: Mapping[str, _Text] = field(default_factory=dict)  # a tied parameter's further name -> its saved name
    versions: Mapping[str, _Text] = field(default_factory=dict)
    saved_at: _Text = ""  # ISO 8601
    files: Annotated[Mapping[str, FileSum], AfterValidator(_is_inside)] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of `checkpoint.json`. Raises CheckpointError for one that is too long to be read again."""
        values = {"format": FORMAT, **asdict(self)}
        if _depth(values) > _MOST_DEEP:
            raise CheckpointError(f"{INFO_FILE} of step {self.step:,}: {_TOO_DEEP}; save flatter values as extra")
        text = sealed(values)
        if len(text) > _MOST_BYTES:
            raise CheckpointError(
                f"{INFO_FILE} of step {self.step:,} has {len(text):,} characters, and may have {_MOST_BYTES:,}; save "
                "less as extra"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class ReadInfo:
    """The info of a checkpoint, and what is known of its file."""

    info: Info
    has_sum: bool  # whether the file has a sum of itself, which fits


_KEYS = {field.name for field in fields(Info)}
# Keys by format; `base` is missing in the first files of format 1.
_ALL_KEYS = {_WITHOUT_SUM: _KEYS - {"identity"}, FORMAT: _KEYS}
_OPTIONAL_KEYS = {_WITHOUT_SUM: {"base"}, FORMAT: set[str]()}

_LAST_LINE = ',\n "sum": "{}"\n}}\n'
_HIDDEN_SUM = re.compile(re.escape(_LAST_LINE.format("SUM")).replace("SUM", "([0-9a-f]{64})").encode())
_LENGTH_OF_LAST_LINE = len(_LAST_LINE.format("0" * 64))


def sealed(values: Mapping[str, Any]) -> str:
    """JSON of values, with a last line that has the SHA-256 of what stands before it."""
    text = json.dumps(values, indent=1, ensure_ascii=False).removesuffix("\n}")
    return text + _LAST_LINE.format(hashlib.sha256(text.encode()).hexdigest())


def read_info(folder: Path) -> Info:
    """Read a checkpoint's info. Raises CheckpointError if the file is missing, damaged or of another format."""
    return read_with_sum(folder).info


def read_with_sum(folder: Path) -> ReadInfo:
    """Read a checkpoint's info, and whether its file has a sum of itself. Raises as `read_info` does."""
    file = folder / INFO_FILE
    try:
        raw = read_plain(file, _MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {INFO_FILE}") from None
    try:
        info, has_sum = _of_bytes(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {_reason(error)}") from None
    except _OtherFormatError as error:
        raise CheckpointError(f"{file} is of {error}; this version of samestep reads 1 and {FORMAT}") from None
    named = step_of(folder)
    if named is not None and named != info.step:
        raise CheckpointError(f"{file} is damaged: it says step {info.step}, and its folder is called {folder.name}")
    return ReadInfo(info=info, has_sum=has_sum)


class _OtherFormatError(Exception):
    """Valid JSON, of a format that isn't known."""


def _of_bytes(raw: bytes) -> tuple[Info, bool]:
    """The info in a file's bytes, and whether they have a sum.

    Raises ValueError or RecursionError for damage, and _OtherFormatError.
    """
    values = json.loads(raw.decode("utf-8"), object_pairs_hook=_each_once)
    if not isinstance(values, dict):
        raise _OtherFormatError("no format")
    number = values.pop("format", None)
    if type(number) is not int or number not in _ALL_KEYS:
        raise _OtherFormatError("no format" if number is None else f"format {str(number)[:20]}")
    if number != _WITHOUT_SUM:
        _check_sum(raw)
        del values["sum"]
    if unknown := sorted(values.keys() - _ALL_KEYS[number]):
        raise ValueError(f"it has {unknown[0][:100]!r}, which format {number} has not")
    if lacking := sorted(_ALL_KEYS[number] - _OPTIONAL_KEYS[number] - values.keys()):
        raise ValueError(f"it has no {lacking[0]}")
    if _depth(values) > _MOST_DEEP:
        raise ValueError(_TOO_DEEP)
    json.dumps(values, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
    return _SCHEMA.validate_python(values), number != _WITHOUT_SUM


def _check_sum(raw: bytes) -> None:
    """Raise ValueError unless the bytes end in the sum of those before."""
    end = len(raw) - _LENGTH_OF_LAST_LINE
    match = _HIDDEN_SUM.fullmatch(raw, max(0, end))
    if match is None:
        raise ValueError("the sum of itself is missing at its end")
    if hashlib.sha256(raw[:end]).hexdigest().encode() != match[1]:
        raise ValueError("it is not what was written: the sum of itself differs")


def _depth(values: Any) -> int:
    """How many sections and lists stand in one another, counted up to one more than may be."""
    depth, level = 0, [values]
    while depth <= _MOST_DEEP:
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            break
        depth += 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    """The values of a section or a list."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A section of the file as a mapping. Raises ValueError for a key that stands twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} stands twice")
    return values


_SCHEMA = TypeAdapter(Info)


def _reason(error: Exception) -> str:
    """Why a file can't be of a checkpoint, in one line."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, ValidationError):
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])[:100]
        return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
    return str(error)
