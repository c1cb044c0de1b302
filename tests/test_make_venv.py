"""`tools/make-venv` makes an environment of the newest Python that was tried, or says in a sentence what is wrong."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.processes]

ROOT = Path(__file__).resolve().parent.parent
NONE = "found no Python 3.11 to 3.13 with venv"


def python(program: Path, version: int) -> Path:
    """A program that says that it is Python 3.`version`, and makes environments with a link to itself."""
    program.parent.mkdir(exist_ok=True)
    says = f'if [ "$1" = -c ]; then echo {version}; exit; fi'
    program.write_text(f'#!/bin/sh\n{says}\nmkdir -p "$3/bin"\nln -s "{program}" "$3/bin/python"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def make(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script where the Pythons of `place/bin` are the only ones."""
    tools = place / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("mkdir", "ln", "sh"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or name)
    command = [str(ROOT / "tools" / "make-venv"), str(place / "venv"), *words]
    variables = {**os.environ, "PATH": f"{place / 'bin'}:{tools}"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=20)


def test_the_newest_python_that_was_tried_is_taken(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    assert NONE in make(tmp_path).stderr
    python(programs / "python3.14", 14)
    python(programs / "python3.10", 10)
    python(programs / "python3.13", 13).write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")  # pyenv's, if it is off
    assert NONE in make(tmp_path).stderr
    python(programs / "python3.11", 11)
    python(programs / "python3", 12)
    done = make(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"make: {tmp_path / 'venv'} is made of python3\n")
    assert (tmp_path / "venv" / "bin" / "python").resolve() == programs / "python3"


def test_an_environment_that_is_there_stays_unless_another_python_is_named(tmp_path: Path) -> None:
    python(tmp_path / "bin" / "python3.11", 11)
    python(tmp_path / "bin" / "python3.12", 12)
    assert make(tmp_path, "python3.11").returncode == 0
    assert make(tmp_path).returncode == 0
    assert make(tmp_path, "python3.11").returncode == 0
    assert (tmp_path / "venv" / "bin" / "python").resolve().name == "python3.11"
    refused = make(tmp_path, "python3.12")
    assert refused.returncode == 1
    assert "is of Python 3.11, and PYTHON=python3.12 is 3.12; remove it" in refused.stderr


def test_old_and_broken_pythons_are_told(tmp_path: Path) -> None:
    old = python(tmp_path / "bin" / "python3.10", 10)
    assert f"PYTHON={old} is Python 3.10, and samestep needs 3.11 or newer" in make(tmp_path, str(old)).stderr
    assert "PYTHON=nothing is no Python that starts" in make(tmp_path, "nothing").stderr
    inside = tmp_path / "venv" / "bin" / "python"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(old)
    assert "is of Python 3.10, and samestep needs 3.11; remove it" in make(tmp_path).stderr
    inside.unlink()
    assert "has no Python that starts; remove it" in make(tmp_path).stderr
