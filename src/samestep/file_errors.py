"""What an error of the system at a file means for the user: what is full or gone, where, and what helps."""

import errno
import os
import resource
from pathlib import Path

from samestep.sizes import binary_size

# Errors of a file system that says no for reasons that lie outside of this program.
_REASONS = {
    errno.EFBIG: "it would be larger than this process may write; raise the limit (ulimit -f)",
    errno.EDQUOT: "the quota there is used up; {elsewhere}",
    errno.EACCES: "it may not be written by this user; {elsewhere}",
    errno.EPERM: "it may not be written by this user; {elsewhere}",
    errno.EROFS: "it is on a read-only file system; {elsewhere}",
    errno.EIO: "the disk reports an error (EIO); dmesg tells which disk; {elsewhere}",
    errno.ESTALE: "the file server no longer knows the folder (ESTALE); mount it again, or {elsewhere}",
    errno.ETIMEDOUT: "the file server doesn't answer (ETIMEDOUT); {elsewhere}",
    errno.ENOENT: "there is no such folder; {elsewhere}",
    errno.ENOTDIR: "a file is in the place of a folder there; {elsewhere}",
    errno.EMFILE: "this process may open no more files; raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has no more open files to give; end what holds them",
    errno.ENOMEM: "the machine has no memory left for it; end what else holds memory",
}


def room(folder: Path) -> tuple[int, int] | None:
    """Return the free and all bytes of the file system of a folder, or of its nearest parent; None if unknown."""
    for place in (folder, *folder.absolute().parents):
        try:
            state = os.statvfs(place)
        except OSError:
            continue
        return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    return None


def reason_of(error: OSError, folder: Path, *, elsewhere: str, needs: int | None = None) -> str:
    """Explain why the system refuses a file of `folder`, and what helps.

    `elsewhere`: advice that names another folder, such as "use another run.folder". `needs`: bytes of the file.
    """
    if error.errno == errno.ENOSPC:
        return f"no space is left there{_numbers(folder, needs)}; make some, or {elsewhere}"
    reason = _REASONS.get(error.errno or 0)
    return reason.format(elsewhere=elsewhere) if reason is not None else error.strerror or str(error)


def _numbers(folder: Path, needs: int | None) -> str:
    """What is free in a folder and what is needed, in brackets; "" if unknown."""
    parts = [] if needs is None else [f"{binary_size(needs)} are needed"]
    sizes = room(folder)
    if sizes is not None:
        free, whole = sizes
        parts.append(f"{binary_size(free)} of {binary_size(whole)} are free")
        if _lacks_inodes(folder):
            parts.append("and no more files fit, whatever their size")
    return f" ({', '.join(parts)})" if parts else ""


def _lacks_inodes(folder: Path) -> bool:
    """Whether a file system has no inode left; file systems without inodes have 0 of 0."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return False
    return state.f_files > 0 and state.f_favail == 0


# Messages of PyTorch, Python and the C++ library about a limit that was reached.
_FILES, _THREADS = "Too many open files", ("can't start new thread", "Resource temporarily unavailable")
_MEMORY = ("Cannot allocate memory", "std::bad_alloc")


def reached_limit(error: BaseException) -> str | None:
    """Explain that a limit of this process or machine was reached, and how it is raised; None for another error."""
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or _FILES in text:
        return f"a process may open {_limit(resource.RLIMIT_NOFILE)} files, too few here; raise it: ulimit -n 4096"
    if number == errno.EAGAIN or any(words in text for words in _THREADS):
        return (
            f"no process or thread more can be started: a user may have {_limit(resource.RLIMIT_NPROC)} (ulimit -u), "
            f"and a process {_limit(resource.RLIMIT_AS)} bytes of addresses (ulimit -v); raise what is low"
        )
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if limited and (isinstance(error, MemoryError) or number == errno.ENOMEM or any(w in text for w in _MEMORY)):
        return f"a process may have {_limit(resource.RLIMIT_AS)} bytes of addresses, too few; raise it: ulimit -v"
    return None


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def refused(error: OSError) -> str | None:
    """Explain an error of the system that lies outside of this program, wherever it was met; None for another one."""
    if (limit := reached_limit(error)) is not None:
        return limit
    if error.errno not in (*_REASONS, errno.ENOSPC) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return None
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if file is None:
        return f"the system refuses: {error.strerror}"
    reason = reason_of(error, file.parent, elsewhere="use another folder")
    return f"{file} can't be written: {reason}"
