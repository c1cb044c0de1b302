"""Copies in the memory of several hosts: each keeps its own ranks' files and those of the host before it.

When one host is lost the others have all of it, and bring it to every host that goes on or comes again.

With hosts 0 ... h-1, each host's leader sends the files of its ranks to the next host (h-1 to 0), so each host's
files are on two hosts and any one may be lost. The index and `checkpoint.json` go to all. Memory is reserved before
anything is sent: a host whose memory is full says so while nobody waits for it. A copy counts only with its info,
written last.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.checkpoint.safe_index import METADATA_FILE, read_metadata
from samestep.run_folder import INFO_FILE, name_of, steps_in

# A host's copies by step and sign, each with its files' sizes.
_Copies = Mapping[tuple[int, str], Mapping[str, int]]
# Does something on every rank; where it fails on one, all ranks raise that one's error.
Together = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The hosts of a group of all ranks. On each the first rank, its leader, looks after its files."""

    group: dist.ProcessGroup
    rank: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each

    @classmethod
    def find(cls, group: dist.ProcessGroup, local_rank: int) -> Self:
        """Every rank must ask. Ranks of a host have consecutive numbers, and the first of them is local rank 0."""
        numbers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(numbers, local_rank, group=group)
        starts = [rank for rank, number in enumerate(numbers) if number == 0]
        ends = [*starts[1:], len(numbers)]
        hosts = tuple(tuple(range(first, last)) for first, last in zip(starts, ends, strict=True))
        return cls(group=group, rank=dist.get_rank(group), hosts=hosts)

    @property
    def leaders(self) -> list[int]:
        return [host[0] for host in self.hosts]

    @property
    def leads(self) -> bool:
        return self.rank in self.leaders

    def spread(self, unfinished: Path, info: str, together: Together) -> str:
        """Give the next host this one's files, and every host the index and the info of rank 0, which is returned."""
        if len(self.hosts) == 1:
            return info
        told: list[Any] = [(unfinished / METADATA_FILE).read_bytes(), info] if self.rank == 0 else [None, None]
        dist.broadcast_object_list(told, src=0, group=self.group)
        index, info = told
        sizes: list[Mapping[str, int]] = self._of_leaders(self._own_files(unfinished))
        at = self.leaders.index(self.rank) if self.leads else 0
        theirs: Mapping[str, int] = sizes[at - 1] if self.leads else {}

        def make_room() -> None:
            """Reserve the memory of what is to come from the host before."""
            if self.leads:
                (unfinished / METADATA_FILE).write_bytes(index)
                for name, size in theirs.items():
                    _reserve(unfinished / name, size)

        together(make_room)
        if self.leads:
            after = self.leaders[(at + 1) % len(self.leaders)]
            works = [self._send(part, after, tag) for tag, part in _mapped(unfinished, sizes[at])]
            works += [self._receive(part, self.leaders[at - 1], tag) for tag, part in _mapped(unfinished, theirs)]
            for work in works:
                work.wait()
        return info

    def gather(self, place: Path, together: Together) -> bool:
        """Bring the newest copy of which the hosts together have every file to all of them; False without one.

        Newer ones, of which a part is lost, are removed.
        """
        held: list[_Copies] = self._of_leaders(_copies(place) if self.leads else {})
        for step, sign in sorted({copy for copies in held for copy in copies}, reverse=True):
            holders = [copies.get((step, sign), {}) for copies in held]
            if self._bring(place / name_of(step), sign, holders, together):
                return True
            if self.leads and holders[self.leaders.index(self.rank)]:
                (place / name_of(step) / INFO_FILE).unlink(missing_ok=True)
        return False

    def _bring(self, copy: Path, sign: str, holders: list[Mapping[str, int]], together: Together) -> bool:
        """Bring a copy's files to the hosts that lack some; whether there are enough of them.

        `holders`: what each leader has of it, by file name and bytes. All ranks call: leaders send and receive, one
        file after the other in one order, so that sends and receives pair up.
        """
        owners: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for leader, files in zip(self.leaders, holders, strict=True):
            for name, size in files.items():
                owners.setdefault(name, leader)
                sizes.setdefault(name, size)
        source = owners[INFO_FILE]
        needed: list[Any] = [None]

        def read_index() -> None:
            if self.rank == source:
                needed[0] = sorted({each.relative_path for each in read_metadata(copy).storage_data.values()})

        together(read_index)
        dist.broadcast_object_list(needed, src=source, group=self.group)
        if not owners.keys() >= set(needed[0]):
            return False
        # The info comes last: with it a copy is one.
        names = [*needed[0], METADATA_FILE, INFO_FILE]
        lacking = {
            leader: {name: sizes[name] for name in names if name not in files}
            for leader, files in zip(self.leaders, holders, strict=True)
        }
        mine = lacking.get(self.rank, {})

        def make_room() -> None:
            if mine:
                copy.mkdir(parents=True, exist_ok=True)
                if (copy / INFO_FILE).is_file() and _sign(copy) != sign:
                    (copy / INFO_FILE).unlink()
            for name, size in mine.items():
                _reserve(copy / name, size)

        together(make_room)
        # One after the other, in an order that all leaders know.
        for leader, files in lacking.items():
            for tag, name in enumerate(files):
                if self.rank in (leader, owners[name]) and sizes[name]:
                    part = _map(copy / name, sizes[name])
                    act = self._receive if self.rank == leader else self._send
                    act(part, owners[name] if self.rank == leader else leader, tag).wait()
        return True

    def _own_files(self, folder: Path) -> dict[str, int]:
        """The files that this host's ranks have written; a leader's word."""
        if not self.leads:
            return {}
        marks = tuple(f"__{rank}_" for rank in self.hosts[self.leaders.index(self.rank)])
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name.startswith(marks)}

    def _of_leaders(self, mine: Any) -> list[Any]:
        """What each host's leader says, in the order of hosts. Every rank calls."""
        said: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(said, mine, group=self.group)
        return [said[leader] for leader in self.leaders]

    def _send(self, part: Tensor, to: int, tag: int) -> Any:
        return dist.isend(part, to, group=self.group, tag=tag)

    def _receive(self, part: Tensor, sender: int, tag: int) -> Any:
        return dist.irecv(part, sender, group=self.group, tag=tag)


def _copies(place: Path) -> _Copies:
    """The copies in a folder: by step and what tells two of one step apart, the files and their bytes."""
    found: dict[tuple[int, str], dict[str, int]] = {}
    for step in steps_in(place):
        copy = place / name_of(step)
        found[step, _sign(copy)] = {path.name: path.stat().st_size for path in copy.iterdir()}
    return found


def _sign(copy: Path) -> str:
    """What tells a copy from another one of the same step, which other ranks may have made."""
    return hashlib.sha256((copy / INFO_FILE).read_bytes()).hexdigest()


def _reserve(file: Path, size: int) -> None:
    """Take the room for a file now: a mapped one for which there is none ends its process. Raises OSError."""
    with file.open("wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


def _mapped(folder: Path, sizes: Mapping[str, int]) -> Iterator[tuple[int, Tensor]]:
    """Files with something in them, each with its number."""
    for number, (name, size) in enumerate(sizes.items()):
        if size:
            yield number, _map(folder / name, size)


def _map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
