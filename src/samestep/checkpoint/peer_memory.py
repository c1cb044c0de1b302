"""Checkpoints in memory, replicated between hosts: each keeps its own ranks' files and those of the host before it.

With hosts 0 ... h-1, each host's leader sends the files of its ranks to the next host (h-1 to 0), so each file is on
two hosts and any one host may be lost. The index and `checkpoint.json` go to all hosts. After a restart, the leaders
send every host the files that it lacks. Memory is reserved before anything is sent, so that a host without enough
memory fails before others wait for it. A copy is valid only with its info, which is written last.
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

from samestep.checkpoint.safe_index import METADATA_FILE, files_of, read_metadata
from samestep.run_folder import INFO_FILE, name_of, steps_in

# A host's copies by step and digest: file name -> bytes.
_Copies = Mapping[tuple[int, str], Mapping[str, int]]
# Calls a function on every rank; if it fails on one, all ranks raise that rank's error.
Together = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The hosts of a group of all ranks. The first rank of each is its leader and sends and receives its files."""

    group: dist.ProcessGroup
    rank: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each

    @classmethod
    def find(cls, group: dist.ProcessGroup, local_rank: int) -> Self:
        """Find the hosts from the ranks' local ranks. Every rank must ask.

        Ranks of a host have consecutive numbers, and the first of them is local rank 0.
        """
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
        """Send this host's files to the next host, and rank 0's index and info to every host; return that info."""
        if len(self.hosts) == 1:
            return info
        told: list[Any] = [None, None]
        own: dict[str, int] = {}

        def read() -> None:
            """Read the index, and the sizes of this host's files."""
            if self.rank == 0:
                told[:] = (unfinished / METADATA_FILE).read_bytes(), info
            own.update(self._own_files(unfinished))

        together(read)
        dist.broadcast_object_list(told, src=0, group=self.group)
        index, info = told
        sizes: list[Mapping[str, int]] = self._of_leaders(own)
        at = self.leaders.index(self.rank) if self.leads else 0
        theirs: Mapping[str, int] = sizes[at - 1] if self.leads else {}

        def make_room() -> None:
            """Reserve the memory for the files of the host before."""
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
        """Send the newest copy of which every file is on some host to all hosts; False if there is none.

        Newer copies, of which a file is lost, are removed.
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
        """Send a copy's files to the hosts that lack them; False if a file is on no host.

        `holders`: each leader's files of the copy, as name -> bytes. All ranks call; leaders send and receive one
        file after the other in the same order, so that sends and receives pair up.
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
                needed[0] = files_of(read_metadata(copy))

        together(read_index)
        dist.broadcast_object_list(needed, src=source, group=self.group)
        if not owners.keys() >= set(needed[0]):
            return False
        # The info comes last: it makes a copy valid.
        names = [*needed[0], METADATA_FILE, INFO_FILE]
        lacking = {
            leader: {name: sizes[name] for name in names if name not in files}
            for leader, files in zip(self.leaders, holders, strict=True)
        }
        missing = lacking.get(self.rank, {})

        def make_room() -> None:
            if missing:
                copy.mkdir(parents=True, exist_ok=True)
                if (copy / INFO_FILE).is_file() and _sign(copy) != sign:
                    (copy / INFO_FILE).unlink()
            for name, size in missing.items():
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
        """The files that this host's ranks have written, as name -> bytes; empty on ranks that are no leader."""
        if not self.leads:
            return {}
        marks = tuple(f"__{rank}_" for rank in self.hosts[self.leaders.index(self.rank)])
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name.startswith(marks)}

    def _of_leaders(self, own: Any) -> list[Any]:
        """All-gather a value and keep that of each host's leader, in the order of hosts. Every rank calls."""
        answers: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(answers, own, group=self.group)
        return [answers[leader] for leader in self.leaders]

    def _send(self, part: Tensor, to: int, tag: int) -> Any:
        return dist.isend(part, to, group=self.group, tag=tag)

    def _receive(self, part: Tensor, sender: int, tag: int) -> Any:
        return dist.irecv(part, sender, group=self.group, tag=tag)


def _copies(place: Path) -> _Copies:
    """The copies in a folder by step and digest: file name -> bytes."""
    copies: dict[tuple[int, str], dict[str, int]] = {}
    for step in steps_in(place):
        copy = place / name_of(step)
        if not (copy / INFO_FILE).is_file():
            continue
        copies[step, _sign(copy)] = {path.name: path.stat().st_size for path in copy.iterdir()}
    return copies


def _sign(copy: Path) -> str:
    """SHA-256 of a copy's info, which distinguishes copies of the same step from different runs."""
    return hashlib.sha256((copy / INFO_FILE).read_bytes()).hexdigest()


def _reserve(file: Path, size: int) -> None:
    """Allocate a file's memory now. Raises OSError; writing to a mapped file without memory would raise SIGBUS."""
    with file.open("wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


def _mapped(folder: Path, sizes: Mapping[str, int]) -> Iterator[tuple[int, Tensor]]:
    """Map the files that are not empty, each with its number, the message tag."""
    for number, (name, size) in enumerate(sizes.items()):
        if size:
            yield number, _map(folder / name, size)


def _map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
