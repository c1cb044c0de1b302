"""Saving: copy what this rank holds, then write it, beside the training and with every other rank, and name it last.

Until its name is given a checkpoint is none, so whatever ends the job at whatever moment, the one before it stands.

The sequence, on every rank:

    1. copy     this rank's boxes into memory of its own, between two steps; the training goes on after it
    2. write    files of step-N.unfinished, by a thread beside the training; a process group of its own, so that its
                messages don't get between those of a step
    3. sum      checksums of the files, gathered on rank 0
    4. name     rank 0 writes checkpoint.json, syncs files and folder, and renames the folder: one atomic act

A step between two saves waits for the one before. What fails on one rank is raised on all (`together`).
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from samestep.checkpoint import folder as folders
from samestep.checkpoint.folder import FileSum, Info, sums_of
from samestep.checkpoint.peer_memory import Neighbours
from samestep.checkpoint.planner import SavePlanner
from samestep.checkpoint.safe_index import METADATA_FILE
from samestep.errors import CheckpointError
from samestep.parallel.state_shards import Box, Piece
from samestep.run_folder import INFO_FILE

# Named in the errors of PyTorch's writer of files, which keep the system's to themselves.
_WRITERS = ("PytorchStreamWriter", "inline_container")
# Called on rank 0 with a checkpoint that has just become one.
Saved = Callable[[Path, Info], None]


class Saver:
    """Writes checkpoints of one training into a folder; every rank has one, and makes the same calls.

    `asynchronous`: the caller waits for the copy alone, and for the checkpoint before where that is still written.
    `group` is of all ranks, on the CPU, and for this alone: its messages must not mix with the training's.
    `durable`: on the disk to stay, with checksums; else in memory, for as long as the host has power.
    `neighbours`: of hosts that have a folder each, in which each keeps another's files as well.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        *,
        asynchronous: bool,
        durable: bool = True,
        neighbours: Neighbours | None = None,
        saved: Saved | None = None,
    ) -> None:
        self._folder = folder
        self._neighbours = neighbours
        self._saved = saved
        self._durable = durable
        self._group = group
        self._rank = dist.get_rank()
        self._leads = neighbours.leads if neighbours is not None else self._rank == 0
        self._asynchronous = asynchronous
        self._writing: Future[None] | None = None
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.waited_seconds = 0.0  # that the training stood still for it

    def prepare(self) -> None:
        """Make the folder and clear it of what a run before left half done. Raises CheckpointError."""

        def prepare() -> None:
            """Make the folder, and remove what an interrupted save has left."""
            if self._leads:
                self._folder.mkdir(parents=True, exist_ok=True)
                folders.remove_unfinished(self._folder)

        self.together(prepare, self._folder)

    def idle_group(self) -> dist.ProcessGroup:
        """The group, once the checkpoint before is written, beside which no other message may be sent.

        Raises CheckpointError where that one can't be written.
        """
        began = time.perf_counter()
        self.wait()
        self.waited_seconds += time.perf_counter() - began
        return self._group

    def save(self, pieces: Mapping[str, Piece], info: Info) -> None:
        """Save a checkpoint. Raises CheckpointError where this one, or the one before, can't be written."""
        self.idle_group()
        began = time.perf_counter()
        if self._asynchronous:
            self._writing = _beside(partial(self._write, self._copied(pieces), info))
        else:
            self._write(pieces, info)
        self.waited_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises CheckpointError where it can't be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces as they are now, in the host's memory. It is kept: fresh memory costs as much as the copy."""
        waits: set[torch.device] = set()
        copied: dict[str, Piece] = {}
        for name, piece in pieces.items():
            boxes = []
            for box in piece.boxes:
                on_device = box.values.device.type != "cpu"
                copy = self._copies.get((name, box.offsets))
                if copy is None or copy.shape != box.values.shape or copy.dtype != box.values.dtype:
                    copy = torch.empty(box.values.shape, dtype=box.values.dtype, pin_memory=on_device)
                    self._copies[name, box.offsets] = copy
                copy.copy_(box.values, non_blocking=on_device)
                if on_device:
                    waits.add(box.values.device)
                boxes.append(Box(offsets=box.offsets, values=copy))
            copied[name] = replace(piece, boxes=boxes)
        for device in waits:
            torch.accelerator.synchronize(device)
        return copied

    def _write(self, pieces: Mapping[str, Piece], info: Info) -> None:
        """Acts 2 to 4, in the thread beside the training."""
        unfinished = self._folder / (folders.name_of(info.step) + folders.UNFINISHED)
        try:
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(unfinished, overwrite=False, sync_files=self._durable),
                planner=SavePlanner(pieces),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise _as_error(unfinished, dict(error.failures)) from None
        sums = self._gathered_sums(unfinished) if self._durable else {}
        info = replace(info, files=sums)
        # The info names every file with its checksum, so it can only be written when all of them are there.
        text = info.to_json()
        if self._neighbours is not None:
            text = self._neighbours.spread(unfinished, text, partial(self.together, where=unfinished))
        self.together(lambda: self._complete(unfinished, text, info), unfinished)

    def _gathered_sums(self, unfinished: Path) -> dict[str, FileSum]:
        """The sums of all files, each made by the rank that wrote it."""
        mine: dict[str, FileSum] = {}

        def make() -> None:
            """Checksums of the files that this rank wrote."""
            names = [path.name for path in unfinished.iterdir() if path.name.startswith(f"__{self._rank}_")]
            mine.update(sums_of(unfinished, [*names, *([METADATA_FILE] if self._rank == 0 else [])]))

        self.together(make, unfinished)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=self._group)
        return {name: each for sums in gathered for name, each in sorted(sums.items())}

    def _complete(self, unfinished: Path, text: str, info: Info) -> None:
        """On the leader: see that all files are there, write the info, make everything durable, rename."""
        if not self._leads:
            return
        if hidden := [name for name in info.files if not (unfinished / name).is_file()]:
            raise CheckpointError(
                f"{unfinished / hidden[0]} was written by another rank and can't be seen by rank 0; "
                "use a folder that all hosts share"
            )
        write_durably(unfinished / INFO_FILE, text)
        if self._durable:
            _make_durable(unfinished)
        path = folders.make_complete(unfinished)
        if self._durable:
            _make_durable(self._folder)
        if self._saved is not None:
            self._saved(path, info)

    def together(self, act: Callable[[], None], where: Path) -> None:
        """Do something on every rank; where it fails on one, all ranks raise that one's error."""
        failures: list[Any] = [None] * dist.get_world_size()
        mine: BaseException | None = None
        try:
            act()
        except (OSError, CheckpointError) as error:
            mine = error
        dist.all_gather_object(failures, mine, group=self._group)
        found = {rank: (failure,) for rank, failure in enumerate(failures) if failure is not None}
        if found:
            raise _as_error(where, found)


def _beside(write: Callable[[], None]) -> Future[None]:
    """Call a function in a thread of its own, for which a process that fails does not wait."""
    result: Future[None] = Future()

    def call() -> None:
        """The thread's work: what it raises is raised where the result is waited for."""
        try:
            write()
        except BaseException as error:  # it is raised where the result is waited for
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=call, name="checkpoint", daemon=True).start()
    return result


def _as_error(where: Path, failures: Mapping[int, Any]) -> CheckpointError:
    """The first rank's failure (an exception, and perhaps where it was raised) as one message."""
    rank = min(failures)
    error = failures[rank][0]
    if isinstance(error, CheckpointError):
        return error
    reasons = {
        errno.ENOSPC: "no space is left there; make some, or set run.checkpoint.folder to a folder with more",
        errno.EFBIG: "it would be larger than this process may write; raise the limit (ulimit -f)",
        errno.EDQUOT: "the quota there is used up; set run.checkpoint.folder to another folder",
        errno.EACCES: "it may not be written by this user; set run.checkpoint.folder to a folder that may",
        errno.EROFS: "it is on a read-only file system; set run.checkpoint.folder to another folder",
    }
    reason = reasons.get(error.errno or 0, error.strerror) if isinstance(error, OSError) else repr(error)
    # What PyTorch's writer meets while a file is full, it tells as an error of its own.
    if reason is None or any(name in str(error) for name in _WRITERS):
        reason = f"PyTorch could not write it, as when no space is left ({error})"
    return CheckpointError(f"checkpoint {where.name} can't be written into {where.parent} by rank {rank}: {reason}")


def write_durably(file: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _make_durable(folder: Path) -> None:
    """Have the system write a folder's names to its disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
