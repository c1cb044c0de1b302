"""Models whose construction writes files are built by one rank of a host after the other.

A `model()` may save a folder and load it again: a library that reads its modules from a folder, a tokenizer that is
trained. If all ranks did so at once, one would read a file that another one has just emptied. What writes is found
out as it happens, so that ranks that only read, as nearly all do, build at the same time.

transformers saves on rank 0 alone once processes have joined, and a rank that loads what it saved would find nothing.
While a rank builds a model, transformers saves on it as it does in one process.
"""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep import private_folders

_LONGEST = 600.0  # seconds that a rank waits for others, which may have ended: then it builds as it is
_PAUSE = 0.02
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.move", "shutil.rmtree"})
_TEMPORARY = frozenset({"tempfile.mkdtemp", "tempfile.mkstemp"})


@contextmanager
def in_turn() -> Iterator[None]:
    """Context of a rank's `model()`: from its first write to a file that other ranks may read, it is alone in it.

    Writes of native code without one of Python's before are not noticed, nor what a child process writes.
    """
    path = private_folders.temporary_folder() / f"samestep-model-{os.geteuid()}-{os.getppid()}"
    turn = _Turn(path)
    turn.begin()
    sys.addaudithook(turn.look)
    try:
        with _saved_on_each_rank():
            yield
    finally:
        turn.end()


@contextmanager
def _saved_on_each_rank() -> Iterator[None]:
    """Context in which transformers is told that processes have not joined, and it alone.

    Other libraries are not: a model may make groups of its own, or sum a codebook over all ranks.
    """
    actual, thread = dist.is_initialized, threading.get_ident()

    def is_initialized() -> bool:
        library = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return actual() and (library != "transformers" or threading.get_ident() != thread)

    dist.is_initialized = is_initialized
    try:
        yield
    finally:
        dist.is_initialized = actual


class _Turn:
    """The lock of the models that one launcher's ranks build on this host, held alone from the first write on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None  # None: the file can't be made, and ranks build as they are
        self._looks = True  # a hook can't be removed
        self._thread = threading.get_ident()
        self._own: list[str] = []  # temporary files and folders, whose names no other rank knows

    def begin(self) -> None:
        """Take the lock, shared, as soon as no rank writes."""
        with suppress(OSError):
            while self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                self._wait(fcntl.LOCK_SH)
                if not self._is_there():  # the last rank of those before removed it meanwhile
                    os.close(self._descriptor)
                    self._descriptor = None

    def end(self) -> None:
        """Give the lock back, and remove its file if no other rank has it."""
        self._looks = False
        if self._descriptor is None:
            return
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_there():
                self._path.unlink()
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        """Whether the open file is still the one of that name."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _wait(self, kind: int) -> None:
        """Wait for the lock, shared or alone."""
        assert self._descriptor is not None
        deadline = time.monotonic() + _LONGEST
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE)

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The hook: Python calls it for what is opened, renamed and removed, among others."""
        if not self._looks or threading.get_ident() != self._thread:
            return
        if event in _TEMPORARY:
            self._own.append(str(arguments[0]))
            return
        writes = event in _CHANGES or (event == "open" and _opens_to_write(*arguments))
        if writes and self._descriptor is not None and self._is_shared(arguments[0]):
            self._looks = False
            self._wait(fcntl.LOCK_EX)

    def _is_shared(self, path: Any) -> bool:
        """Whether another rank may read the file: not a temporary file, a device or what Python compiles."""
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        return bool(name) and "__pycache__" not in name and not name.startswith(("/dev/", "/proc/", *self._own))


def _opens_to_write(path: Any, mode: Any, flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & _WRITING)
