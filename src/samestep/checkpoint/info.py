"""Info: what a checkpoint says of itself in `checkpoint.json`, the file without which it is none."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from samestep.checkpoint.base import Base, base_of_json
from samestep.errors import CheckpointError
from samestep.run_folder import INFO_FILE

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """A file of a checkpoint as it was when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Info:
    """Where a training stood, and what wrote it down."""

    step: int  # optimizer steps taken; the next step has this number, counted from 0
    epoch: int | None  # None where nobody counts them
    layout: str
    processes: int
    engine: str
    recipe: Mapping[str, Any]  # as a job file says it; empty for a loop of one's own
    scaler: Mapping[str, float] = field(default_factory=dict)  # of the loss, under fp16
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the evaluation after this step
    extra: Mapping[str, Any] = field(default_factory=dict)  # what a loop of one's own gave along
    base: Base | None = None  # frozen parameters that it does not hold; None: it holds all
    tied: Mapping[str, str] = field(default_factory=dict)  # further names of parameters -> where they stand
    versions: Mapping[str, str] = field(default_factory=dict)
    saved_at: str = ""  # ISO 8601
    files: Mapping[str, FileSum] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def read_info(folder: Path) -> Info:
    """Read a checkpoint's info. Raises CheckpointError where the file is no such thing."""
    file = folder / INFO_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {INFO_FILE}") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    known = {each.name for each in fields(Info)}
    if not isinstance(values, dict) or values.get("format") != FORMAT or not known - {"base"} <= values.keys():
        found = values.get("format") if isinstance(values, dict) else None
        raise CheckpointError(f"{file} is of format {found}; this version of samestep reads format {FORMAT}")
    try:
        sums = {str(name): FileSum(**each) for name, each in values["files"].items()}
    except (TypeError, AttributeError):
        raise CheckpointError(f"{file} is damaged: its list of files is not one") from None
    try:
        base = None if values.get("base") is None else base_of_json(values["base"])
    except (TypeError, KeyError):
        raise CheckpointError(f"{file} is damaged: what it says of a base is not of one") from None
    read = {"files": sums, "base": base}
    return Info(**{**{name: values[name] for name in known - read.keys()}, **read})
