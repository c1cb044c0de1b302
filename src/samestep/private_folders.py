"""Private folders: what this process loads from them, no other user can have put there or exchange.

A library in a cache is run, a call in a scratch folder is unpickled, and kept token ids decide a training. So a file
or folder is used only if it and all its parents up to / belong to this user or to root, and no other user may write
to them. A folder such as /tmp (mode 1777), where everybody may write but only its owner can rename or remove a file,
is accepted as a parent of what is this user's own.

Every part of a path is opened relative to the one before it, and checked as it is open, so that nothing is exchanged
between the check and the use. Links are followed if they belong to this user or root. Access lists (ACLs) are not
read, except for what the mode shows of them.
"""

import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from samestep import environment
from samestep.errors import UserError

_FOLLOWED = 40  # links in a path, as Linux follows
_LOOK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocked by a pipe that stands in a file's place.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotPrivateError(Exception):
    """Another user could write to a file or folder, or exchange it; the message says who and where, in one clause."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self._remedy = remedy  # a command by which this user ends that

    def advising(self, instead: str) -> str:
        """The reason, and what to do: the command, where there is one, or what the caller says."""
        return f"{self}; " + (f"use {self._remedy}, or " if self._remedy else "") + instead


def opened(path: Path, *, as_parent: bool = False) -> int:
    """Open a private file or folder, and return its descriptor.

    `as_parent`: only what is made in the folder has to be private, so it may be one such as /tmp. Raises
    NotPrivateError, or OSError as `os.open` does.
    """
    walk = _Walk(path.absolute())
    try:
        walk.begin()
        while walk.rest:
            walk.step(as_parent=as_parent)
    except BaseException:
        walk.end()
        raise
    return walk.descriptor


def check(path: Path, *, as_parent: bool = False) -> None:
    """Raise NotPrivateError, or OSError, for a file or folder that `opened` would refuse."""
    os.close(opened(path, as_parent=as_parent))


def make(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone. Raises NotPrivateError and OSError.

    One that is there already is checked as `opened` does.
    """
    missing: list[str] = []
    there = folder.absolute()
    while True:
        try:
            descriptor = opened(there, as_parent=bool(missing))
            break
        except FileNotFoundError:
            missing.append(there.name)
            there = there.parent
    try:
        for name in reversed(missing):
            with suppress(FileExistsError):  # another process of this user's made it; it is checked below
                os.mkdir(name, 0o700, dir_fd=descriptor)
            inner = os.open(name, _LOOK, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    finally:
        os.close(descriptor)
    if missing:
        check(folder)


class _Walk:
    """The way from / to a path, with the part that was reached last open."""

    def __init__(self, path: Path) -> None:
        self.rest = list(reversed(path.parts[1:])) or ["."]
        self.descriptor = -1
        self._path = path
        self._links = 0

    def begin(self) -> None:
        """Open /."""
        self.end()
        self._here = Path("/")
        self.descriptor = os.open("/", _LOOK)
        state = os.fstat(self.descriptor)
        # Who owns / could exchange all of the system. In a container this may be a user without a name.
        self._owners = {0, os.geteuid(), state.st_uid}
        self._shared = _is_shared(state)
        _check_writers(state, self._here, as_parent=True)

    def end(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def step(self, *, as_parent: bool) -> None:
        """Go one part further; a link is replaced by what it points to."""
        name = self.rest.pop()
        place = self._here / name
        state = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        self._check_owner(state, place)
        if stat.S_ISLNK(state.st_mode):
            self._follow(os.readlink(name, dir_fd=self.descriptor))
            return
        inner = os.open(name, _LOOK if stat.S_ISDIR(state.st_mode) else _READ, dir_fd=self.descriptor)
        os.close(self.descriptor)
        self.descriptor = inner
        state = os.fstat(inner)
        self._check_owner(state, place)
        self._here = place
        self._shared = _is_shared(state)
        _check_writers(state, place, as_parent=bool(self.rest) or as_parent)

    def _follow(self, target: str) -> None:
        self._links += 1
        if self._links > _FOLLOWED:
            raise NotPrivateError(f"{self._path} goes through more than {_FOLLOWED} links")
        parts = Path(target).parts
        if Path(target).is_absolute():
            self.begin()
            parts = parts[1:]
        self.rest += reversed(parts)

    def _check_owner(self, state: os.stat_result, place: Path) -> None:
        """In a folder in which everybody may write, only what this user or root has made is trusted."""
        trusted = {0, os.geteuid()} if self._shared else self._owners
        if state.st_uid not in trusted:
            kind = "is a link that belongs" if stat.S_ISLNK(state.st_mode) else "belongs"
            raise NotPrivateError(f"{place} {kind} to {_user(state.st_uid)}")


def _is_shared(state: os.stat_result) -> bool:
    """Whether others may add to a folder, but not rename or remove what isn't theirs."""
    return stat.S_ISDIR(state.st_mode) and bool(state.st_mode & stat.S_ISVTX) and bool(state.st_mode & 0o022)


def _check_writers(state: os.stat_result, place: Path, *, as_parent: bool) -> None:
    """Raise NotPrivateError if the mode lets other users write, and exchange what this one has made there."""
    if as_parent and _is_shared(state):
        return
    if state.st_mode & stat.S_IWOTH:
        writers, change = "everybody", "o-w"
    elif state.st_mode & stat.S_IWGRP and not _is_own_group(state.st_gid):
        writers, change = f"the group {_group(state.st_gid)}", "g-w"
    else:
        return
    remedy = f"`chmod {'+t' if as_parent else change} {place}`" if os.geteuid() in (0, state.st_uid) else None
    raise NotPrivateError(f"{place} can be written by {writers}", remedy)


@cache
def _is_own_group(number: int) -> bool:
    """Whether a group has no member but this user, as the one that Debian makes for each user; or root's own.

    With such groups a umask of 002 is usual, by which a user's folders are writable by the group.
    """
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    if not set(group.gr_mem) <= {user.pw_name, "root"}:
        return False
    if number == 0:
        return True
    named_alike = number == user.pw_gid and group.gr_name == user.pw_name
    return named_alike and all(other.pw_gid != number or other.pw_uid == user.pw_uid for other in pwd.getpwall())


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as in a container
        return f"user {number}"


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


_OTHER_CACHE = "XDG_CACHE_HOME names another folder"


def is_kept(folder: Path, instead: str = _OTHER_CACHE) -> bool:
    """Whether files may be kept in a cache's folder, which is made where it isn't there; tells once why not.

    `instead`: what the message advises.
    """
    try:
        make(folder)
    except (NotPrivateError, OSError) as error:
        danger = ", into which another user could put files" if isinstance(error, NotPrivateError) else ""
        tell(f"nothing is kept in {folder}{danger}: {explained(error, instead)}")
        return False
    return True


def is_private(path: Path) -> bool:
    """Whether a file or folder is there and private."""
    try:
        check(path)
    except (NotPrivateError, OSError):
        return False
    return True


_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))


def temporary_folder() -> Path:
    """The folder for temporary files, or where other users could exchange what is made there, another one, told once.

    It is then that of all libraries, and of the processes that this one starts. Raises UserError where there is none.
    """
    try:
        usual = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return _in_memory()
    try:
        check(usual, as_parent=True)
    except (NotPrivateError, OSError) as error:
        reason = error
    else:
        return usual
    for other in _TEMPORARY:
        with suppress(NotPrivateError, OSError):
            check(other, as_parent=True)
            if os.access(other, os.W_OK | os.X_OK):
                tell(f"temporary files are in {other}, since other users could exchange those in {usual}: {reason}")
                tempfile.tempdir = str(other)
                environment.use_temporary_folder(other)
                return other
    raise UserError(
        "there is no folder in which other users can't exchange this one's temporary files: "
        f"{explained(reason, 'TMPDIR names another folder')}"
    )


def _in_memory() -> Path:
    """Take the folder in memory for temporary files, since none on a disk can be written; told once."""
    folder = Path("/dev/shm")
    if not (is_safe_parent(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(
            "no folder for temporary files can be written: that of TMPDIR, /tmp, /var/tmp and this one are full, or "
            "read-only; point TMPDIR to a folder with room"
        )
    tell(f"temporary files are in {folder}, since no folder for them on a disk can be written")
    tempfile.tempdir = str(folder)
    environment.use_temporary_folder(folder)
    return folder


def explained(error: NotPrivateError | OSError, instead: str) -> str:
    """What is wrong with a folder, and what to do."""
    return error.advising(instead) if isinstance(error, NotPrivateError) else f"{error.strerror}; {instead}"


def is_safe_parent(folder: Path) -> bool:
    """Whether what this user makes in a folder stays this user's."""
    try:
        check(folder, as_parent=True)
    except (NotPrivateError, OSError):
        return False
    return True


@cache
def tell(line: str) -> None:
    """Print a line once in a job: not by the ranks that samestep's agent starts, since the agent tells it."""
    ranks = None
    with suppress(UserError):  # reported where the ranks are looked for
        ranks = environment.ranks()
    if environment.round_of_rank() is None and (ranks is None or ranks.rank == 0):
        print(f"samestep: {line}", file=sys.stderr)
