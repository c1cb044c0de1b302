"""Writes a job to start from into an empty folder: job file, sample data, and a task where none ships for it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError, closest
from samestep.plugins import COMMUNICATION_PLUGINS, ENGINE_PLUGINS

_TEMPLATES = Path(__file__).parent / "templates"
# Of job files, for editors; tools/job_keys.py makes it of the declarations that check a job.
JOB_SCHEMA = Path(__file__).parent / "job.schema.json"
_JOB = "job.yaml"
_MAKE_DATA = "make_data.py"
_TIME_LIMIT = 120.0  # seconds, in which sample data are made; they take one or two


@dataclass(frozen=True, kw_only=True)
class Template:
    """A folder with a job file, what the job needs, and a script that makes its sample data."""

    name: str
    folder: Path

    @property
    def summary(self) -> str:
        """The first line of the job file, without its number sign."""
        return (self.folder / _JOB).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    @property
    def files(self) -> Sequence[Path]:
        """Its files, the job file first; without what Python compiled of them, which lies in a folder."""
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        return sorted(files, key=lambda path: path.name != _JOB)


def templates() -> dict[str, Template]:
    """The templates that ship with samestep, by name."""
    folders = sorted(file.parent for file in _TEMPLATES.glob(f"*/{_JOB}"))
    return {folder.name: Template(name=folder.name, folder=folder) for folder in folders}


def write(name: str, folder: Path) -> Sequence[Path]:
    """Copy a template's files into a folder, which is made where it is missing, and make the sample data there.

    The job file begins with the line by which editors find the schema of job files, which lies next to it.

    Returns the files, the job file first. Raises UserError for an unknown template, for a folder that is not empty
    or can't be written, and where the sample data can't be made.
    """
    names = templates()
    if name not in names:
        raise UserError(f'there is no template "{name}"; {closest(name, names)}')
    _check_empty(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copied = [folder / file.name for file in names[name].files]
        for file, copy in zip(names[name].files, copied, strict=True):
            shutil.copyfile(file, copy)
        schema = folder / JOB_SCHEMA.name
        schema.write_text(job_schema(), encoding="utf-8")
        job = copied[0].read_text(encoding="utf-8")
        copied[0].write_text(f"# yaml-language-server: $schema={schema.name}\n{job}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}; use another folder") from None
    _make_data(folder / _MAKE_DATA)
    copied.append(schema)
    return [*copied, *sorted(path for path in folder.rglob("*") if path.is_file() and path not in copied)]


def job_schema() -> str:
    """The JSON Schema of job files, with the engines and methods that installed distributions add."""
    text = JOB_SCHEMA.read_text(encoding="utf-8")
    engines, kinds = ENGINE_PLUGINS.names(), COMMUNICATION_PLUGINS.names()
    if not engines and not kinds:
        return text
    schema = json.loads(text)
    engine = schema["$defs"]["Run"]["properties"]["engine"]["anyOf"]
    engine[0]["enum"] = sorted({*engine[0]["enum"], *engines})
    added = {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": kinds}}}
    if kinds:
        schema["$defs"]["Recipe"]["properties"]["communication"]["anyOf"].insert(0, added)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _check_empty(folder: Path) -> None:
    """Raise UserError for a folder in which something would be overwritten."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; use a folder that is empty or not there yet")
    try:
        first = min((path.name for path in folder.iterdir()), default=None)
    except OSError as error:
        raise UserError(f"{folder} can't be read: {error.strerror}; use another folder") from None
    if first is not None:
        raise UserError(f"{folder} is not empty ({first} is in it); use a folder that is empty or not there yet")


def _make_data(script: Path) -> None:
    """Run a template's script in a process of its own, as a user runs it."""
    command = [sys.executable, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{script} made no data within {_TIME_LIMIT:.0f} s; run it again by hand") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"{script} made no data: {reason}; mend that, then run it again")
