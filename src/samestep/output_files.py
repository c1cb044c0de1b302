"""Files that commands write where the user says so: their options, what is refused before any work, and JSON.

A command adds its options by `add_arguments(parser, json="...", report="...")`, calls
`check(options, "json", "report")` first of all, and writes JSON by `write_json`, other texts by `write`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.extras import is_installed
from samestep.input_files import path_option


def add_arguments(parser: argparse.ArgumentParser, *, also: str = "", **helps: str) -> None:
    """Add an option for each output file, and --force, which lets them replace existing files.

    `also`: what else --force replaces in this command.
    """
    for name, text in helps.items():
        parser.add_argument(f"--{name}", type=path_option, metavar="FILE", help=text)
    flags = " and ".join(f"--{name}" for name in helps)
    parser.add_argument("--force", action="store_true", help=f"let {flags} replace a file that is there{also}")


def check(options: argparse.Namespace, *names: str) -> None:
    """Raise UserError where a file can't be written, before minutes are spent on what would stand in it."""
    named: dict[Path, str] = {}
    for name in names:
        file: Path | None = getattr(options, name)
        if file is None:
            continue
        _check(f"--{name}", file, force=options.force)
        if (other := named.setdefault(file.resolve(), name)) != name and not _takes_both(file):
            raise UserError(f"--{name} {file}: --{other} writes the same file; give each its own")


def check_report(options: argparse.Namespace, *, install: str = 'pip install "samestep[report]"') -> None:
    """Raise UserError for --report where plotly isn't installed; `install`: the command that installs it."""
    if options.report is not None and not is_installed("plotly"):
        raise UserError(f"--report needs plotly, which is not installed; {install}")


def _check(flag: str, file: Path, *, force: bool) -> None:
    if file.is_dir():
        raise UserError(f"{flag} {file}: this is a folder; the path of a file is wanted")
    if not file.parent.is_dir():
        raise UserError(f"{flag} {file}: there is no folder {file.parent}; make it, or write elsewhere")
    # An empty file, such as mktemp makes, and what is no file, such as /dev/stdout, have nothing to lose.
    if not force and file.is_file() and file.stat().st_size > 0:
        raise UserError(f"{flag} {file}: this file is there already; use --force to replace it, or write elsewhere")


def _takes_both(file: Path) -> bool:
    """Whether what is written first isn't lost to what is written second, as in /dev/stdout."""
    return file.exists() and not file.is_file()


def write_json(file: Path | None, values: Any) -> None:
    """Write values for other programs to read; None: nowhere."""
    if file is not None:
        write(file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write(file: Path, text: str) -> None:
    """Write a text. Raises UserError where that fails, as on a full disk."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the file {file} can't be written: {error.strerror}; write elsewhere") from None
