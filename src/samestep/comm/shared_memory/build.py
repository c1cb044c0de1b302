"""Build: compiles kernel.cpp on first use, and keeps the library for later processes."""

import hashlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep import processor
from samestep.environment import cache_folder

SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT = 120  # seconds


class NoKernelError(Exception):
    """The kernel can't be compiled here; the message says why, in one clause."""


def library(environ: Mapping[str, str]) -> Path:
    """The compiled kernel's file, built where it isn't there yet. Raises NoKernelError.

    `$CXX` names the compiler, with arguments if it has some (`ccache g++`). Files are kept in
    `$XDG_CACHE_HOME/samestep`, or `~/.cache/samestep`, one for each source, compiler and processor. Several processes
    may build at once: each compiles into a folder of its own and renames the file.
    """
    compiler = _compiler(environ)
    folder = cache_folder(environ)
    made_of = SOURCE.read_bytes() + "\n".join((*compiler, *_FLAGS, processor.instruction_set())).encode()
    key = hashlib.sha256(made_of).hexdigest()[:16]
    built = folder / f"kernel-{key}.so"
    if built.is_file():
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = tempfile.TemporaryDirectory(dir=folder, prefix="kernel-")
    except OSError as error:
        raise NoKernelError(
            f"{folder} can't be written: {error.strerror}; XDG_CACHE_HOME names another folder"
        ) from error
    with own as place:  # the compiler makes the file, with the permissions that the user's files have
        name = str(Path(place) / "kernel.so")
        # Not every compiler knows this machine's processor.
        if (said := _compile((*compiler, *_FLAGS, "-march=native"), name)) is not None:
            said = _compile((*compiler, *_FLAGS), name)
        if said is not None:
            raise NoKernelError(f"{shlex.join(compiler)} fails: {said}; CXX names another compiler")
        Path(name).replace(built)
    return built


def _compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The compiler's program and its arguments."""
    named = environ.get("CXX")
    commands = [shlex.split(named)] if named else [[name] for name in _COMPILERS]
    for program, *arguments in commands:
        if (path := shutil.which(program)) is not None:
            return (path, *arguments)
    raise NoKernelError(f"there is no C++ compiler ({named or ', '.join(_COMPILERS)}); CXX names one")


def _compile(command: Sequence[str], target: str) -> str | None:
    """Compile the kernel. Returns None on success, otherwise the compiler's first line of output."""
    try:
        ended = subprocess.run(
            [*command, str(SOURCE), "-o", target], capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    return next((line for line in ended.stderr.splitlines() if line.strip()), f"exit code {ended.returncode}")
