"""Scratch folders, which last as long as their process. A later process removes those of a killed one."""

import fcntl
import multiprocessing
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from samestep import file_errors, private_folders
from samestep.errors import StartError

# A file system in memory, on Linux.
_IN_MEMORY = Path("/dev/shm")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Create a scratch folder in memory, which also holds this process's named semaphores.

    PyTorch's agent passes queues and an event to the ranks as named semaphores. If all processes of a job are killed,
    multiprocessing's resource tracker too, a later start removes the semaphores with the folder.
    """
    if not (_IN_MEMORY.is_dir() and os.access(_IN_MEMORY, os.W_OK) and private_folders.is_safe_parent(_IN_MEMORY)):
        with scratch("samestep-memory-") as folder:
            yield folder
        return
    settings = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    before = settings["semprefix"]
    with scratch("samestep-memory-", _IN_MEMORY) as folder:
        settings["semprefix"] = f"/{folder.name}"
        try:
            yield folder
        finally:
            settings["semprefix"] = before
            _remove_own_semaphores(folder)


# A file in the folder that its process holds locked; the kernel releases the lock however the process ends.
_HELD = ".held"


@contextmanager
def scratch(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """Create a folder with a name prefix, by default among the system's temporary files, and remove it at exit.

    Ranks unpickle what their starter has written there, so other users must not be able to exchange it.
    """
    places = [where] if where is not None else [private_folders.temporary_folder()]
    if where is None and private_folders.is_safe_parent(_IN_MEMORY):
        places.append(_IN_MEMORY)
    for place in places[:1]:
        for left in place.glob(f"{prefix}*"):
            with suppress(OSError):  # another one removes it, or it can't be
                _remove_unless_held(left)
    folder, lock = _made_in(prefix, places)
    owner = os.getpid()
    try:
        yield folder
    finally:
        # A forked process has this generator too, and closes it when it lets go of what the starter registered to do
        # at exit: a rank that multiprocessing's fork server forks does so first of all, since Python 3.13.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _made_in(prefix: str, places: Sequence[Path]) -> tuple[Path, int | None]:
    """Create and lock a folder in the first place that takes it. Raises StartError if none does."""
    reasons: list[str] = []
    for place in dict.fromkeys(places):
        try:
            return _made(prefix, place)
        except OSError as error:
            elsewhere = "point TMPDIR to a folder with room"
            reasons.append(f"{place} can't be written: {file_errors.reason_of(error, place, elsewhere=elsewhere)}")
    raise StartError(f"no folder for temporary files: {'; '.join(reasons)}")


def _remove_own_semaphores(folder: Path) -> None:
    """Remove the semaphores with a folder's name that this process has created.

    multiprocessing does it when their objects are collected or the process ends, which may be long after the folder
    is gone: if the process were killed in between, no later start would find them.
    """
    for finalizer in list(util._finalizer_registry.values()):  # pyright: ignore[reportAttributeAccessIssue]
        if finalizer._callback is SemLock._cleanup and finalizer._args[0].startswith(f"/{folder.name}-"):  # pyright: ignore[reportAttributeAccessIssue]
            finalizer()


def _semaphores(folder: Path) -> list[Path]:
    """The named semaphores of a folder's process: multiprocessing names them sem.PREFIX-RANDOM."""
    return list(folder.parent.glob(f"sem.{folder.name}-*"))


def _made(prefix: str, where: Path) -> tuple[Path, int | None]:
    """Create a folder and lock it; the lock is None if the file system has no locks."""
    while True:
        folder = Path(mkdtemp(prefix=prefix, dir=where))
        file = folder / _HELD
        lock: int | None = None
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return folder, lock
        if file.exists():
            return folder, lock
        os.close(lock)  # another process took it for an orphan before it was locked


def _remove_unless_held(folder: Path) -> None:
    """Remove this user's folder if no process holds its lock. One without a lock file is another user's, or new."""
    if folder.lstat().st_uid != os.getuid():
        return
    lock = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for semaphore in _semaphores(folder):
            semaphore.unlink(missing_ok=True)
        shutil.rmtree(folder)  # not through a symbolic link
    finally:
        os.close(lock)


def left_in(places: Collection[Path] | None = None) -> list[Path]:
    """List this package's scratch folders whose process has ended without removing them.

    `places`: where to look; None for memory and the folder for temporary files.
    """
    places = {Path(gettempdir()), _IN_MEMORY} if places is None else places
    folders = [folder for place in places if place.is_dir() for folder in place.glob("samestep-*")]
    return sorted(folder for folder in folders if _is_left(folder))


def _is_left(folder: Path) -> bool:
    """Whether a folder's process has ended: the kernel has then released its lock."""
    try:
        lock = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another's, or gone
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
