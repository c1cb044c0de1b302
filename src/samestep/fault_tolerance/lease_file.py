"""The files of a folder's lease: found, read and created. Anybody may have written them.

No link is followed, no pipe is waited for, and no more is read than a lease's file holds.
"""

import errno
import os
import re
import stat
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.fault_tolerance.lease_owner import LARGEST, Owner, owner_in

_NAME = re.compile(r"\.lease-(\d{1,18})")
_NEW = ".lease-new-"  # beginning of the name of a file that is linked once it is complete
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_GONE = (errno.ENOENT, errno.ESTALE)


def file_of(folder: Path, number: int) -> Path:
    """The lease file of a number."""
    return folder / f".lease-{number}"


def leases_in(folder: Path) -> dict[int, Path]:
    """The lease files of a folder by their numbers; none where there is no folder."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        if error.errno in _GONE:
            return {}
        raise
    return {int(match[1]): folder / match[0] for name in names if (match := _NAME.fullmatch(name))}


def identity(file: Path) -> str | None:
    """What tells a lease file from a later one of the same name; None where it is gone."""
    seen = read(file)
    if seen is None:
        return None
    return seen.owner.id if seen.owner is not None else f"{seen.state[0]}"


@dataclass(frozen=True, kw_only=True)
class SeenLease:
    """A lease file as it was read."""

    owner: Owner | None  # None: it can't be read
    plain: bool  # whether it is a plain file; no other was ever a lease
    state: tuple[int, int, bytes]  # changes with each heartbeat


def read(file: Path) -> SeenLease | None:
    """Read a lease file without following links or waiting for a pipe; None where it is gone. May raise OSError."""
    try:
        status = file.lstat()
        content = b""
        if stat.S_ISREG(status.st_mode):
            content = _content(file)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    plain = stat.S_ISREG(status.st_mode)
    return SeenLease(
        owner=owner_in(content) if plain else None,
        plain=plain,
        state=(status.st_ino, status.st_mtime_ns, content),
    )


def _content(file: Path) -> bytes:
    """The beginning of a file; empty where this user may not read it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return b""
    try:
        return os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)


def created(file: Path, content: bytes) -> int | None:
    """Create a lease file with its content at once, and return a descriptor of it; None where its name is taken."""
    new = file.with_name(f"{_NEW}{uuid.uuid4().hex}")
    descriptor = _written(new, content)
    try:
        os.link(new, file)
    except FileExistsError:
        # Over a network the answer to a first attempt may be lost, and the second one finds the link there.
        if os.fstat(descriptor).st_nlink == 2:
            return descriptor
    except FileNotFoundError:  # the one who was faster has removed `new`
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            os.close(descriptor)
            raise
        os.close(descriptor)
        try:
            return _written(file, content)
        except FileExistsError:
            return None
    else:
        return descriptor
    finally:
        with suppress(OSError):
            new.unlink()
    os.close(descriptor)
    return None


def _written(file: Path, content: bytes) -> int:
    """Create a file that must not be there, and return a descriptor of it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o666)
    try:
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            file.unlink()
        raise
    return descriptor


def temporary_in(folder: Path) -> list[Path]:
    """The files of processes that ended while they created a lease, or of such that are about to try again."""
    return [path for path in folder.iterdir() if re.fullmatch(rf"{re.escape(_NEW)}[0-9a-f]{{32}}", path.name)]
