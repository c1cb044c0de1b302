"""The lease of a folder: one training at a time writes into it, also where the file system has no locks (NFS).

The lease is a file `.lease-N` that names its owner (`lease_owner`) and counts the owner's heartbeats. The file with
the largest N counts. What keeps two from holding a folder:

- A file comes into being by a hard link of a complete one, which fails where its name is there; so of several that
  take over the same lease one gets the next number.
- The owner renews its file through its own descriptor, never by name, so it can't write into its successor's.
- A lease is taken over where its process is gone, if it was of this host, and else where its heartbeat has not
  changed for its limit by the observer's own clock. Clocks and times of files are never compared between hosts.
- The owner looks whether its file still counts before it changes what others could have changed (`Held.check`).

A lease file that can't be read counts as one of an unknown owner. What is no plain file was never a lease.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import CheckpointError, UserError, shown
from samestep.fault_tolerance.lease_file import SeenLease, created, file_of, identity, leases_in, read, temporary_in
from samestep.fault_tolerance.lease_owner import Owner
from samestep.fault_tolerance.watchdog import Clock

BEAT = 2.0  # seconds between heartbeats
LIMIT = 30.0  # seconds without one after which a lease of another host is taken over
_LOOK = 0.2  # seconds between two looks at another's lease
_LAST = 5.0  # seconds to wait for a heartbeat under way
_ATTEMPTS = 100  # to take a lease that others take and leave


class FolderInUseError(UserError):
    """Another training holds the folder: who, and what to do."""

    def __init__(self, message: str, folder: Path | None = None) -> None:
        super().__init__(message)
        self.folder = folder


class LeaseLostError(CheckpointError):
    """This training's lease was taken over, or its folder was deleted: it may not write there any more."""


@dataclass(kw_only=True)
class Held:
    """The leases that a training holds, for each process of it that writes."""

    id: str  # of the owner
    files: tuple[Path, ...]
    _looked_at: float = 0.0

    def check(self) -> None:
        """Raise LeaseLostError unless all leases still count. To be called before files are changed."""
        for file in self.files:
            leases = leases_in(file.parent)
            last = leases[max(leases)] if leases else None
            seen = read(file)
            if last == file and seen is not None and seen.owner is not None and seen.owner.id == self.id:
                continue
            raise LeaseLostError(_reason_lost(file, None if last in (None, file) else last))
        # Not where it is lost: a save in the background may be the first to notice, and the loop looks again.
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Check once every few seconds; to be called after every step. A disk that fails for a moment is no loss."""
        if time.monotonic() - self._looked_at >= BEAT:
            with suppress(OSError):
                self.check()


def _reason_lost(file: Path, last: Path | None) -> str:
    """Say how a lease was lost; `last`: the file that counts now."""
    folder = file.parent
    ends = "this one ends and writes nothing more there"
    if not folder.is_dir():
        return f"{shown(folder)} was deleted while the training ran; {ends}. Start it again in a folder that stays"
    seen = read(last) if last is not None else None
    if seen is not None and seen.owner is not None:
        return (
            f"{shown(folder)} was taken over by another training ({seen.owner}) while this one was cut off or "
            f"suspended; {ends}"
        )
    return (
        f"{shown(folder)} is no longer held by this training: {file.name} is gone or altered, and another one may "
        f"have written there; {ends}"
    )


@contextmanager
def hold(folders: Sequence[Path], *, job: str | None = None) -> Iterator[Held]:
    """Hold the leases of folders, which are created where they are missing.

    Raises FolderInUseError where another training holds one, UserError where one can't be written. `job`: common to
    all rounds of a job; a lease of an earlier round is taken over at once.
    """
    owner = Owner.here(LIMIT, job)
    folders = tuple(dict.fromkeys(folder.absolute() for folder in folders))
    silence = _Silence()
    for folder in folders:
        silence.note(folder)
    with ExitStack() as stack:
        leases = []
        for folder in folders:
            if any(lease.file.parent.samefile(folder) for lease in leases if folder.is_dir()):
                continue  # two names of one folder
            leases.append(_Lease(folder, owner, silence))
            stack.callback(leases[-1].release)
        stack.enter_context(_heartbeats(leases))
        yield Held(id=owner.id, files=tuple(lease.file for lease in leases))


def check_free(folder: Path) -> None:
    """Raise FolderInUseError where a process of this host is known to hold a folder; nothing is written."""
    with suppress(OSError):
        leases = leases_in(folder)
        seen = read(leases[max(leases)]) if leases else None
        if seen is not None and seen.owner is not None and seen.owner.life == "alive":
            raise FolderInUseError(_in_use(folder, seen.owner), folder)


class _Lease:
    """The lease of one folder."""

    def __init__(self, folder: Path, owner: Owner, silence: "_Silence") -> None:
        """Acquire it; raises as `hold` does."""
        self._owner = owner
        self._silence = silence
        self._beats = 0
        self._made: list[Path] = []  # folders that were created for it
        self._lock = threading.Lock()  # of the descriptor, which the thread of the heartbeats uses
        self._descriptor: int | None = None  # None: released
        try:
            self.file, self._descriptor = self._acquired(folder)
        except OSError as error:
            self._remove_folders()
            raise UserError(f"{shown(folder)} can't be written: {error.strerror}; use another folder") from None
        except BaseException:
            self._remove_folders()
            raise

    def renew(self) -> None:
        """Count a heartbeat, and have it written to the disk that other hosts see. Raises OSError."""
        with self._lock:
            if self._descriptor is not None:
                self._beats += 1
                os.pwrite(self._descriptor, self._owner.content(self._beats), 0)
                os.fsync(self._descriptor)

    def release(self) -> None:
        """Remove the file if it is still this owner's, and the created folders that hold nothing."""
        if os.getpid() != self._owner.pid:  # a fork of the process that holds it
            return
        if self._lock.acquire(timeout=_LAST):  # else a heartbeat still waits for a disk that doesn't answer
            descriptor, self._descriptor = self._descriptor, None
            self._lock.release()
            if descriptor is not None:
                os.close(descriptor)
        with suppress(OSError):
            seen = read(self.file)
            if seen is not None and seen.owner is not None and seen.owner.id == self._owner.id:
                self.file.unlink()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove those folders that were created for the lease and hold nothing."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def _acquired(self, folder: Path) -> tuple[Path, int]:
        """Take the next number once the owner of the last one has ended; return its file, and a descriptor of it."""
        for attempt in range(_ATTEMPTS):
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            self._made = [*missing, *(path for path in self._made if path not in missing)]
            folder.mkdir(parents=True, exist_ok=True)
            leases = leases_in(folder)
            identities = {path: identity(path) for path in leases.values()}
            last = max(leases, default=0)
            if last and not _has_ended(leases[last], self._owner, self._silence):
                continue
            file = file_of(folder, last + 1)
            try:
                descriptor = created(file, self._owner.content(0))
            except FileNotFoundError:  # another one that ended has removed the folder that it had created
                if attempt + 1 < _ATTEMPTS:
                    continue
                raise
            if descriptor is None:  # another one was faster
                continue
            # A whole training may have come and gone since the look, which leaves the numbers free again.
            others = {path: identity(path) for path in leases_in(folder).values() if path != file}
            if not others.items() <= identities.items():
                file.unlink()
                os.close(descriptor)
                continue
            for path in (*others, *temporary_in(folder)):
                with suppress(OSError):
                    path.unlink()
            return file, descriptor
        raise FolderInUseError(
            f"{shown(folder)} is in use by other trainings, which begin and end there; use another folder",
            folder,
        )


class _Silence:
    """How long leases have been without a heartbeat, by a clock that stops while this process is stopped."""

    def __init__(self) -> None:
        self._clock = Clock(_LOOK)
        self._first: dict[Path, tuple[SeenLease, float]] = {}  # as first seen, and when

    def note(self, folder: Path) -> None:
        """Note a folder's last lease, whose silence counts from now on."""
        with suppress(OSError):
            leases = leases_in(folder)
            if leases and (seen := read(leases[max(leases)])) is not None:
                self.seconds(leases[max(leases)], seen)

    def seconds(self, file: Path, seen: SeenLease) -> float | None:
        """Seconds for which a lease is as it was first seen; None if it isn't, so that its owner is alive."""
        now = self._clock.look()
        first, since = self._first.setdefault(file, (seen, now))
        if _owner_id(first) != _owner_id(seen):  # another lease of the same name
            self._first[file] = seen, now
            return 0.0
        return now - since if first.state == seen.state else None


def _owner_id(seen: SeenLease) -> str | None:
    return None if seen.owner is None else seen.owner.id


def _has_ended(file: Path, successor: Owner, silence: _Silence) -> bool:
    """Whether the owner of a lease has ended; False where the lease is another one now, which is to be looked at.

    Raises FolderInUseError where it is alive. Waits where that can't be known but by its heartbeat.
    """
    first = read(file)
    if first is None:
        return False
    owner = first.owner
    if not first.plain or (owner is not None and successor.follows(owner)):
        return True
    life = owner.life if owner is not None else "unknown"
    if life == "alive":
        raise FolderInUseError(_in_use(file.parent, owner), file.parent)
    if life == "ended":
        return True
    return _is_silent(file, first, silence)


def _is_silent(file: Path, first: SeenLease, silence: _Silence) -> bool:
    """Wait until a lease has stayed as it was first seen for its limit; False where it is another one now."""
    limit = first.owner.limit if first.owner is not None else LIMIT
    announced = False
    while True:
        seen = read(file)
        if seen is None or _owner_id(seen) != _owner_id(first):
            return False
        silent = silence.seconds(file, seen)
        if silent is None:
            raise FolderInUseError(_in_use(file.parent, seen.owner), file.parent)
        if silent >= limit:
            break
        if not announced:
            holder = str(first.owner) if first.owner is not None else f"an owner that can't be read from {file.name}"
            _say(
                f"{shown(file.parent)} is held by {holder}, which may have ended: waits up to {limit:g} s for a sign "
                "of life, and takes the folder over if none comes"
            )
        announced = True
        time.sleep(_LOOK)
    if announced:
        _say(
            f"{shown(file.parent)}: no sign of life of its owner in {limit:g} s; this training takes the folder over"
        )
    return True


def _in_use(folder: Path, owner: Owner | None) -> str:
    holder = str(owner) if owner is not None else "its lease file changes, and can't be read"
    return (
        f"{shown(folder)} is in use by another training ({holder}); wait for its end or stop it, or use another "
        "folder"
    )


@contextmanager
def _heartbeats(leases: Sequence[_Lease]) -> Iterator[None]:
    """Renew leases in a thread."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(leases, over), name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST)


def _beat(leases: Sequence[_Lease], over: threading.Event) -> None:
    """Thread: renews leases until it is over. A disk that fails may answer again later, so it goes on trying."""
    warned = False
    while not over.wait(BEAT):
        for lease in leases:
            try:
                lease.renew()
            except OSError as error:
                if not warned:
                    _say(
                        f"{shown(lease.file.parent)}: the lease can't be renewed: {error.strerror}; tries it again "
                        f"every {BEAT:g} s"
                    )
                warned = True


def _say(text: str) -> None:
    """Print a line for the user."""
    with suppress(OSError, ValueError):  # a closed standard error
        print(f"samestep: {text}", file=sys.stderr, flush=True)
