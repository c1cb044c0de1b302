"""A model of what a crash of the host leaves of file operations: writes are lost or reordered until fsync.

`operations_in` reads the record of the shim of file_faults.c, and `Disk` takes its operations in turn. It keeps what
POSIX promises: the bytes of a file once the file was synced, and the name of an entry once its folder was. All else
may be there or not, in any combination, and any part of a write. Real file systems keep more of the order: what
survives here survives there.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of the record; `other`: the new path of a rename or link."""

    what: str
    offset: int
    path: str
    other: str
    data: bytes


def operations_in(record: Path) -> list[Operation]:
    """Read the record of a training, whose paths have no spaces."""
    content = record.read_bytes()
    operations: list[Operation] = []
    at = 0
    while at < len(content):
        end = content.index(b"\n", at)
        what, _, offset, size, path, other = content[at:end].decode().split(" ")
        at = end + 1 + int(size)
        operations.append(
            Operation(what=what, offset=int(offset), path=path, other=other, data=content[end + 1 : at])
        )
    return operations


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # of a truncation: the size, and None

    def content(self, choose: random.Random | None, share: float) -> bytes:
        """The bytes after a crash; without `choose` those that the operations have made."""
        content = bytearray(self.durable)
        for offset, data in self.pending:
            if choose is not None and choose.random() > share:
                continue
            if data is None:
                content[:] = content[:offset].ljust(offset, b"\0")
                continue
            kept = data if choose is None or choose.random() < 0.7 else data[: choose.randrange(len(data) + 1)]
            content[:] = content.ljust(offset, b"\0")
            content[offset : offset + len(kept)] = kept
        return bytes(content)


class _Folder(dict[str, "_File | _Folder"]):
    """Entries by name."""


@dataclass(frozen=True)
class _Entry:
    """A change of folders' entries: each (folder, name) gets a file or folder, or loses its entry (None)."""

    changes: tuple[tuple[_Folder, str, "_File | _Folder | None"], ...]
    folders: tuple[_Folder, ...]  # any of which makes it durable by a sync


class Disk:
    """The files below a folder that exists and is empty at first."""

    def __init__(self, root: str) -> None:
        self._root_path = root
        self._now = _Folder()  # as processes see it
        self._durable: dict[int, dict[str, _File | _Folder]] = {}  # id of a folder -> its entries after a crash
        self._pending: list[_Entry] = []

    def take(self, operation: Operation) -> None:
        """Apply an operation."""
        folder, name = self._place(operation.path)
        file = folder.get(name)
        if operation.what in ("create", "truncated", "write", "truncate"):
            if not isinstance(file, _File):
                file = _File()
                self._change((folder, name, file))
            if operation.what == "write":
                file.pending.append((operation.offset, operation.data))
            elif operation.what in ("truncated", "truncate"):
                file.pending.append((operation.offset, None))
        elif operation.what == "folder":
            self._change((folder, name, _Folder()))
        elif operation.what == "remove":
            self._change((folder, name, None))
        elif operation.what == "rename":
            self._change((folder, name, None), (*self._place(operation.other), file))
        elif operation.what == "link":
            self._change((*self._place(operation.other), file))
        elif operation.what == "sync" and isinstance(file, _File):
            file.durable, file.pending = file.content(None, 1.0), []
        elif operation.what == "sync":
            synced = self._folder(operation.path)
            for entry in [entry for entry in self._pending if synced in entry.folders]:
                self._keep(entry)
                self._pending.remove(entry)

    def crash(self, choose: random.Random, share: float, into: Path) -> None:
        """Write what a crash may leave into an empty folder; `share` of what isn't durable is there, by chance."""
        left = {key: dict(entries) for key, entries in self._durable.items()}
        for entry in self._pending:
            if choose.random() < share:
                _apply(entry, left)
        self._write(self._now, left, into, choose, share)

    def _write(
        self,
        folder: _Folder,
        left: dict[int, dict[str, "_File | _Folder"]],
        into: Path,
        choose: random.Random,
        share: float,
    ) -> None:
        for name, entry in left.get(id(folder), {}).items():
            if isinstance(entry, _Folder):
                (into / name).mkdir()
                self._write(entry, left, into / name, choose, share)
            else:
                (into / name).write_bytes(entry.content(choose, share))

    def _change(self, *changes: tuple[_Folder, str, "_File | _Folder | None"]) -> None:
        entry = _Entry(changes, tuple(folder for folder, _, _ in changes))
        for folder, name, new in changes:
            if new is None:
                folder.pop(name, None)
            else:
                folder[name] = new
        self._pending.append(entry)

    def _keep(self, entry: _Entry) -> None:
        _apply(entry, self._durable)

    def _folder(self, path: str) -> _Folder:
        folder = self._now
        for name in Path(path).relative_to(self._root_path).parts:
            inner = folder[name]
            assert isinstance(inner, _Folder)
            folder = inner
        return folder

    def _place(self, path: str) -> tuple[_Folder, str]:
        """The folder and the name of a path; of the root itself, a name that nothing has."""
        if path == self._root_path:
            return self._now, ""
        return self._folder(str(Path(path).parent)), Path(path).name


def _apply(entry: _Entry, folders: dict[int, dict[str, "_File | _Folder"]]) -> None:
    for folder, name, new in entry.changes:
        entries = folders.setdefault(id(folder), {})
        if new is None:
            entries.pop(name, None)
        else:
            entries[name] = new
