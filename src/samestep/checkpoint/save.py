"""Saving: copy this rank's shards, write them in the background with the other ranks, rename the folder last.

A checkpoint counts only under its final name, so if the job ends at any moment, the checkpoint before it is intact.

The sequence, on every rank:

    1. copy     this rank's boxes into separate memory, between two steps; the training continues after it
    2. write    files of step-N.saving, in a background thread with its own process group, so that its messages don't
                mix with those of a step
    3. sum      checksums of the files, all-gathered
    4. rename   rank 0 writes checkpoint.json, syncs files and folder, and renames the folder, which is atomic

A save first waits for the one before. An error on one rank is raised on all (`together`). With a `Tolerance`
(`attempts`), steps 2 to 4 are taken again after an error of the system, then in the fallback folder, and then the
save is skipped.
"""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from samestep import file_errors
from samestep.checkpoint import folder as folders
from samestep.checkpoint.attempts import PAUSES, SaveTally, Tolerance, UnwrittenError
from samestep.checkpoint.folder import sums_of
from samestep.checkpoint.info import FileSum, Info
from samestep.checkpoint.peer_memory import Neighbours
from samestep.checkpoint.planner import SavePlanner
from samestep.checkpoint.safe_index import METADATA_FILE
from samestep.errors import CheckpointError, first_line
from samestep.fault_tolerance.lease import Held, LeaseLostError
from samestep.parallel.state_shards import Box, Piece
from samestep.run_folder import ASIDE, INFO_FILE, bytes_in
from samestep.sizes import binary_size

# Names in the errors of PyTorch's file writer, which omit the system's error.
_WRITERS = ("PytorchStreamWriter", "inline_container")
# Bytes of a folder in memory that copies leave free, at least and at most: for the semaphores of a restart, and for
# what NCCL and loader workers share. Between these it is a quarter of the whole.
_KEPT_FREE, _MOST_KEPT_FREE = 16 << 20, 1 << 30
# Bytes of a file that a tensor takes beside its values: what torch.save writes of one, without the index of all.
_OF_A_TENSOR = 1500
# Called on each leader when a checkpoint is complete.
Saved = Callable[[Path, Info], None]


class Saver:
    """Writes the checkpoints of one training into a folder; every rank has a saver and makes the same calls.

    `asynchronous`: `save` returns after the copy, having waited for the checkpoint before it.
    `group`: a CPU group of all ranks that nothing else uses while a checkpoint is written.
    `durable`: sync files to disk and store their checksums; otherwise the folder is in memory.
    `neighbours`: given if each host has a folder of its own and keeps a copy of another host's files.
    `tolerance`: for saves that the system refuses; without one, `save` and `wait` raise their error.
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
        tolerance: Tolerance | None = None,
    ) -> None:
        self._folder = folder
        self._tolerance = tolerance
        self.tally = SaveTally(tolerance) if tolerance is not None else None
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

    @property
    def places(self) -> Sequence[Path]:
        """The folders in which this saver writes, in the order in which it tries them."""
        fallback = self._tolerance.fallback if self._tolerance is not None else None
        return (self._folder, *([fallback] if fallback is not None else []))

    def prepare(self, *, needs: int = 0, strict: bool = True) -> None:
        """Create the folders, remove unfinished checkpoints from them, and try whether they can be written.

        `needs`: bytes that a checkpoint takes at least. Raises CheckpointError if no folder can be written; without
        `strict`, as in a training that has been saved before, warns instead.
        """
        failures: list[CheckpointError] = []
        for place in self.places:
            failure = self._prepared(place, needs)
            if failure is not None:
                failures.append(failure)
        self._bear(failures, strict=strict)

    def _bear(self, failures: Sequence[CheckpointError], *, strict: bool) -> None:
        """Warn of folders that can't be written, or raise the first's error if that is each of them, and `strict`."""
        if strict and len(failures) == len(self.places):
            raise failures[0]
        for failure in failures:
            if self._tolerance is not None:
                self._tolerance.warn(f"{failure}; the training goes on, and each save tries it again")

    def _prepared(self, place: Path, needs: int) -> CheckpointError | None:
        """Prepare a folder, and once more if the system refuses it; return the error that stays."""
        failure: CheckpointError | None = None
        for pause in (0.0, PAUSES[0]):
            time.sleep(pause)
            try:
                self.together(partial(self._prepare, place, needs), place)
            except UnwrittenError as error:  # the same on all ranks
                failure = error
            except LeaseLostError:
                raise
            except CheckpointError as error:
                return error
            else:
                return None
        return failure

    def _prepare(self, place: Path, needs: int) -> None:
        """On leaders: create a folder, remove unfinished checkpoints from it, and write a file into it."""
        if not self._leads:
            return
        self._check_lease()
        place.mkdir(parents=True, exist_ok=True)
        if self._durable:
            _make_reachable(place)
        folders.remove_unfinished(place)
        if not self._durable:
            return
        probe = place / f".samestep-{os.getpid()}"
        try:
            write_durably(probe, "samestep\n")
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        _check_room(place, needs, at_least=True)

    def check_room(self, needs: int) -> None:
        """Check the room for a checkpoint of `needs` bytes once the optimizer has all its state.

        Raises CheckpointError if no folder has it, and warns of those that don't. Every rank must call.
        """
        failures: list[CheckpointError] = []
        for place in self.places:
            try:
                self.together(partial(self._on_leaders, partial(_check_room, place, needs, at_least=False)), place)
            except CheckpointError as error:
                failures.append(error)
        self._bear(failures, strict=True)

    def _on_leaders(self, act: Callable[[], None]) -> None:
        if self._leads:
            act()

    def idle_group(self) -> dist.ProcessGroup:
        """Wait until the pending checkpoint is written, then return the group, which is now free for other messages.

        Raises CheckpointError if that checkpoint can't be written.
        """
        began = time.perf_counter()
        self.wait()
        self.waited_seconds += time.perf_counter() - began
        return self._group

    def save(self, pieces: Mapping[str, Piece], info: Info) -> None:
        """Save a checkpoint. Raises CheckpointError if this one or the pending one can't be written.

        With a tolerance, NotSavedError if too many in a row can't be.
        """
        self.idle_group()
        began = time.perf_counter()
        if self._asynchronous:
            self._writing = _in_background(partial(self._write, self._copied(pieces), info))
        else:
            self._write(pieces, info)
        self.waited_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the pending checkpoint is written. Raises as `save` does."""
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
        """Write a checkpoint into the first folder that takes it; in the background if the saver is asynchronous."""
        if self.tally is None:
            self._write_into(self._folder, pieces, info)
            return
        refusals: list[str] = []  # of each folder
        for place in self.places:
            refusal = ""
            for pause in (0.0, *PAUSES):
                time.sleep(pause)
                try:
                    path = self._write_into(place, pieces, info)
                except UnwrittenError as error:  # the same on all ranks
                    refusal = str(error)
                else:
                    self.tally.wrote(path, instead_of=refusals)
                    return
            refusals.append(refusal)
        self.tally.skip(info.step, refusals, total_bytes(pieces, self._group))

    def _write_into(self, place: Path, pieces: Mapping[str, Piece], info: Info) -> Path:
        """Steps 2 to 4, into one folder; return the checkpoint's path. Raises CheckpointError on all ranks."""
        unfinished = place / (folders.name_of(info.step) + folders.UNFINISHED)
        try:
            return self._attempt(unfinished, pieces, info)
        except CheckpointError:
            if self._leads:  # what is there takes the room that the next try needs
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _attempt(self, unfinished: Path, pieces: Mapping[str, Piece], info: Info) -> Path:
        """Steps 2 to 4, once."""
        needs = 0 if self._durable else total_bytes(pieces, self._group)
        self.together(partial(self._clear, unfinished, needs), unfinished)
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
        self.together(partial(self._complete, unfinished, text, info), unfinished)
        path = unfinished.with_name(folders.name_of(info.step))
        self.together(partial(self._tidy, path, info), unfinished)
        return path

    def _tidy(self, path: Path, info: Info) -> None:
        """On leaders: call what the owner of this saver wants done once a checkpoint is complete."""
        if not self._leads or self._saved is None:
            return
        self._check_lease()
        try:
            self._saved(path, info)
        except OSError as error:  # the checkpoint is complete
            print(
                f"samestep: an older checkpoint can't be removed from {path.parent}: {error.strerror}; the next save "
                "tries it again",
                file=sys.stderr,
                flush=True,
            )

    def _clear(self, unfinished: Path, needs: int) -> None:
        """On leaders: remove what an earlier try has left, and create the folder again if it is gone.

        Raises CheckpointError if the folder is in memory and has no room for `needs` bytes beside what others need.
        """
        if not self._leads:
            return
        self._check_lease()
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        sizes = file_errors.room(unfinished.parent)
        if needs and sizes is not None:
            free, whole = sizes
            kept = min(max(_KEPT_FREE, whole // 4), _MOST_KEPT_FREE)
            if free < needs + kept:
                raise CheckpointError(
                    f"a copy in memory takes {binary_size(needs)}, and of the {binary_size(whole)} of "
                    f"{_mount_of(unfinished.parent)} {binary_size(free)} are free, of which {binary_size(kept)} stay "
                    "for a restart and what ranks share (docker run --shm-size=8g gives more)"
                )

    def _gathered_sums(self, unfinished: Path) -> dict[str, FileSum]:
        """The checksums of all files, each computed by the rank that wrote it."""
        own_sums: dict[str, FileSum] = {}

        def make() -> None:
            """Compute the checksums of the files that this rank wrote."""
            names = [path.name for path in unfinished.iterdir() if path.name.startswith(f"__{self._rank}_")]
            try:
                own_sums.update(sums_of(unfinished, [*names, *([METADATA_FILE] if self._rank == 0 else [])]))
            except CheckpointError as error:  # this rank has just written them
                raise UnwrittenError(str(error)) from None

        self.together(make, unfinished)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own_sums, group=self._group)
        return {name: file_sum for sums in gathered for name, file_sum in sorted(sums.items())}

    def _complete(self, unfinished: Path, text: str, info: Info) -> None:
        """On leaders: check that all files exist, write the info, sync files and folder, rename the folder."""
        if not self._leads:
            return
        if hidden := [name for name in info.files if not (unfinished / name).is_file()]:
            self._check_lease()  # says so if the run's folder was deleted
            if not unfinished.is_dir():
                raise UnwrittenError(f"{unfinished} was deleted while it was written")
            # Once a checkpoint was complete, the folder is known to be shared.
            complete = self.tally is not None and self.tally.newest is not None
            raise (UnwrittenError if complete else CheckpointError)(
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
            _make_durable(path.parent)

    def _check_lease(self) -> None:
        """Raise LeaseLostError where another training has taken the folder over."""
        if self.held is not None:
            self.held.check()

    def together(self, act: Callable[[], None], where: Path) -> None:
        """Call a function on every rank; if it fails on one, all ranks raise the error of the first that failed.

        `where`: the unfinished checkpoint, or the folder of all.
        """
        failures: list[Any] = [None] * dist.get_world_size()
        own_failure: BaseException | None = None
        try:
            act()
        except (OSError, CheckpointError) as error:
            own_failure = error
        dist.all_gather_object(failures, own_failure, group=self._group)
        by_rank = {rank: (failure,) for rank, failure in enumerate(failures) if failure is not None}
        if by_rank:
            raise _as_error(where, by_rank)


def total_bytes(pieces: Mapping[str, Piece], group: dist.ProcessGroup) -> int:
    """Return the bytes that a checkpoint of all ranks' pieces takes at least; every rank must call.

    They are those of the whole tensors, and of what the files say of each: with many small ones that is most of it.
    """
    here = {name: math.prod(piece.shape) * piece.dtype.itemsize + _OF_A_TENSOR for name, piece in pieces.items()}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, here, group=group)
    return sum({name: size for sizes in gathered for name, size in sizes.items()}.values())


def _check_room(place: Path, needs: int, *, at_least: bool) -> None:
    """Raise CheckpointError if a folder's disk has no room for a checkpoint of `needs` bytes, or of more."""
    sizes = file_errors.room(place)
    if sizes is None:
        return
    free, whole = sizes
    free += sum(bytes_in(folder / ASIDE) for folder in (place, place.parent) if file_errors.room(folder) == sizes)
    if free < needs:
        or_more = " or more" if at_least else ""
        raise CheckpointError(
            f"checkpoints can't be written into {place}: one takes {binary_size(needs)}{or_more}, and "
            f"{binary_size(free)} of {binary_size(whole)} are free; make room, or set "
            "run.checkpoint.folder to a folder with more"
        )


def _mount_of(folder: Path) -> Path:
    """The place at which a folder's file system is mounted."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_mount())


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
    """The failure of the first rank that has one as a CheckpointError; `failures`: rank -> (exception, ...).

    An UnwrittenError if it is one of the system, which another try may not meet.
    """
    rank = min(failures)
    error = failures[rank][0]
    if isinstance(error, CheckpointError):
        return error
    unfinished = where.name.endswith(folders.UNFINISHED)
    folder = where.parent if unfinished else where
    what = f"checkpoint {where.name}" if unfinished else "checkpoints"
    of_system = isinstance(error, OSError | MemoryError)
    reason = repr(error)
    if isinstance(error, OSError):
        reason = file_errors.reason_of(error, folder, elsewhere="set run.checkpoint.folder to another folder")
    # PyTorch's writer reports a full disk as an error of its own.
    if any(name in str(error) for name in _WRITERS):
        of_system = True
        reason = f"PyTorch could not write it, as when no space is left ({first_line(error)})"
    return (UnwrittenError if of_system else CheckpointError)(
        f"{what} can't be written into {folder} by rank {rank}: {reason}"
    )


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
