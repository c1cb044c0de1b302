"""Saving: copy this rank's shards, write them in the background with the other ranks, rename the folder last.

A checkpoint counts only under its final name, so if the job ends at any moment, the checkpoint before it is intact.

The sequence, on every rank:

    1. copy     this rank's boxes into separate memory, between two steps; the training continues after it
    2. write    files of step-N.saving, in a background thread with its own process group, so that its messages don't
                mix with those of a step
    3. sum      checksums of the files, all-gathered
    4. rename   rank 0 writes checkpoint.json, syncs files and folder, and renames the folder, which is atomic

A save first waits for the one before. An error on one rank is raised on all (`together`).
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
from samestep.checkpoint.folder import sums_of
from samestep.checkpoint.info import FileSum, Info
from samestep.checkpoint.peer_memory import Neighbours
from samestep.checkpoint.planner import SavePlanner
from samestep.checkpoint.safe_index import METADATA_FILE
from samestep.errors import CheckpointError
from samestep.fault_tolerance.lease import Held
from samestep.parallel.state_shards import Box, Piece
from samestep.run_folder import INFO_FILE

# Names in the errors of PyTorch's file writer, which omit the system's error.
_WRITERS = ("PytorchStreamWriter", "inline_container")
# Called on each leader when a checkpoint is complete.
Saved = Callable[[Path, Info], None]


class Saver:
    """Writes the checkpoints of one training into a folder; every rank has a saver and makes the same calls.

    `asynchronous`: `save` returns after the copy, having waited for the checkpoint before it.
    `group`: a CPU group of all ranks that nothing else uses while a checkpoint is written.
    `durable`: sync files to disk and store their checksums; otherwise the folder is in memory.
    `neighbours`: given if each host has a folder of its own and keeps a copy of another host's files.
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
        held: Held | None = None,
    ) -> None:
        self._folder = folder
        self._neighbours = neighbours
        self._saved = saved
        self.held = held  # the lease of the folder, on the rank that changes it; checked before each change
        self._durable = durable
        self._group = group
        self._rank = dist.get_rank()
        self._leads = neighbours.leads if neighbours is not None else self._rank == 0
        self._asynchronous = asynchronous
        self._writing: Future[None] | None = None
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.waited_seconds = 0.0  # for which saving has blocked the training

    def prepare(self) -> None:
        """Create the folder and remove unfinished checkpoints from it. Raises CheckpointError."""

        def prepare() -> None:
            """Create the folder and remove unfinished checkpoints, on leaders."""
            if self._leads:
                self._check_lease()
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._durable:
                    _make_reachable(self._folder)
                folders.remove_unfinished(self._folder)

        self.together(prepare, self._folder)

    def idle_group(self) -> dist.ProcessGroup:
        """Wait until the pending checkpoint is written, then return the group, which is now free for other messages.

        Raises CheckpointError if that checkpoint can't be written.
        """
        began = time.perf_counter()
        self.wait()
        self.waited_seconds += time.perf_counter() - began
        return self._group

    def save(self, pieces: Mapping[str, Piece], info: Info) -> None:
        """Save a checkpoint. Raises CheckpointError if this one or the pending one can't be written."""
        self.idle_group()
        began = time.perf_counter()
        if self._asynchronous:
            self._writing = _in_background(partial(self._write, self._copied(pieces), info))
        else:
            self._write(pieces, info)
        self.waited_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the pending checkpoint is written. Raises CheckpointError if it can't be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy the pieces into host memory, which is kept for the next save: allocating costs as much as the copy."""
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
        """Steps 2 to 4, in the background thread if the saver is asynchronous."""
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
        """The checksums of all files, each computed by the rank that wrote it."""
        mine: dict[str, FileSum] = {}

        def make() -> None:
            """Compute the checksums of the files that this rank wrote."""
            names = [path.name for path in unfinished.iterdir() if path.name.startswith(f"__{self._rank}_")]
            mine.update(sums_of(unfinished, [*names, *([METADATA_FILE] if self._rank == 0 else [])]))

        self.together(make, unfinished)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=self._group)
        return {name: each for sums in gathered for name, each in sorted(sums.items())}

    def _complete(self, unfinished: Path, text: str, info: Info) -> None:
        """On leaders: check that all files exist, write the info, sync files and folder, rename the folder."""
        if not self._leads:
            return
        if hidden := [name for name in info.files if not (unfinished / name).is_file()]:
            raise CheckpointError(
                f"{unfinished / hidden[0]} was written by another rank and can't be seen by rank 0; "
                "use a folder that all hosts share"
            )
        write_durably(unfinished / INFO_FILE, text)
        if self._durable:
            # PyTorch's writer syncs the index while its text is still in Python's buffer, so none of it is on disk.
            _make_durable(unfinished / METADATA_FILE)
            _make_durable(unfinished)
        self._check_lease()  # this process may have been suspended since the save began
        path = folders.make_complete(unfinished)
        if self._durable:
            _make_durable(self._folder)
        if self._saved is not None:
            self._check_lease()
            self._saved(path, info)

    def _check_lease(self) -> None:
        """Raise LeaseLostError where another training has taken the folder over."""
        if self.held is not None:
            self.held.check()

    def together(self, act: Callable[[], None], where: Path) -> None:
        """Call a function on every rank; if it fails on one, all ranks raise the error of the first that failed."""
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


def _in_background(write: Callable[[], None]) -> Future[None]:
    """Call a function in a daemon thread, for which the process does not wait at its exit."""
    result: Future[None] = Future()

    def call() -> None:
        """Run the function, and pass its exception on to the future."""
        try:
            write()
        except BaseException as error:  # raised again by `result()`
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=call, name="checkpoint", daemon=True).start()
    return result


def _as_error(where: Path, failures: Mapping[int, Any]) -> CheckpointError:
    """The failure of the first rank that has one as a CheckpointError; `failures`: rank -> (exception, ...)."""
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
    # PyTorch's writer reports a full disk as an error of its own.
    if reason is None or any(name in str(error) for name in _WRITERS):
        reason = f"PyTorch could not write it, as when no space is left ({error})"
    return CheckpointError(f"checkpoint {where.name} can't be written into {where.parent} by rank {rank}: {reason}")


def write_durably(file: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _make_reachable(folder: Path) -> None:
    """Sync the entries that lead to a folder.

    The run's folder is new as well, and a crash may lose its entry, with every synced checkpoint below it. Folders
    above it may belong to others: the first that can't be opened or synced ends this, as it was there before.
    """
    for parent in folder.absolute().parents:
        try:
            _make_durable(parent)
        except OSError:
            return


def _make_durable(path: Path) -> None:
    """Sync a file's bytes or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
