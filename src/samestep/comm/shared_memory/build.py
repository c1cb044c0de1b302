"""Build: compiles kernel.cpp on first use, and keeps the library for later processes."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep import private_folders, processor
from samestep.environment import cache_folder

SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT = 120  # seconds
_OTHER = "XDG_CACHE_HOME names another folder"


class NoKernelError(Exception):
    """The kernel can't be compiled here; the message says why, in one clause."""


@contextmanager
def place(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder of compiled kernels: the user's cache, or, where other users could write to it, a temporary one.

    The cache is in `$XDG_CACHE_HOME/samestep`, or `~/.cache/samestep`. Raises NoKernelError if no file can be made.
    """
    folder = cache_folder(environ)
    if private_folders.is_kept(folder) and os.access(folder, os.W_OK):
        yield folder
        return
    try:
        temporary = tempfile.TemporaryDirectory(dir=private_folders.temporary_folder(), prefix="samestep-kernel-")
    except OSError as error:
        reason = f"no temporary file can be made: {error.strerror}"
        raise NoKernelError(f"{reason}; TMPDIR names another folder") from error
    with temporary as name:
        yield Path(name)


def library(environ: Mapping[str, str], folder: Path, *, rebuilt: bool = False) -> Path:
    """The compiled kernel's file in a private folder, built where it isn't there yet. Raises NoKernelError.

    `$CXX` names the compiler, with arguments if it has some (`ccache g++`). There is a file for each source, compiler
    and processor; its name ends with a sum of its contents, since to load a part of a library ends the process.
    `rebuilt`: one that is there is of no use, and is built again. Several processes may build at once: each compiles
    into a folder of its own and renames the file.
    """
    compiler, start = _compiler(environ), f"{key_of(environ)}-"
    for file in sorted(folder.glob(f"{start}*.so")):
        with suppress(OSError):  # another process replaces it
            if not rebuilt and file.name == start + _sum(file) and private_folders.is_private(file):
                return file
            file.unlink()
    try:
        own = tempfile.TemporaryDirectory(dir=folder, prefix="kernel-")
    except OSError as error:
        raise NoKernelError(f"{folder} can't be written: {error.strerror}; {_OTHER}") from error
    with own as name:
        made = Path(name) / "kernel.so"
        # Not every compiler knows this machine's processor.
        if (complaint := _compile((*compiler, *_FLAGS, "-march=native"), str(made))) is not None:
            complaint = _compile((*compiler, *_FLAGS), str(made))
        if complaint is not None:
            raise NoKernelError(f"{shlex.join(compiler)} fails: {complaint}; CXX names another compiler")
        made.chmod(0o700)  # whatever the umask
        return made.replace(folder / (start + _sum(made)))


def key_of(environ: Mapping[str, str]) -> str:
    """The beginning of the names of libraries of this source, compiler and processor. Raises NoKernelError."""
    made_of = SOURCE.read_bytes() + "\n".join((*_compiler(environ), *_FLAGS, processor.instruction_set())).encode()
    return f"kernel-{hashlib.sha256(made_of).hexdigest()[:16]}"


def _sum(file: Path) -> str:
    """The end of a library's name."""
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}.so"


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
