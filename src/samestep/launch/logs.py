"""Logs of ranks: a file a rank and stream, and all of it on the terminal, each line with the rank that wrote it."""

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from samestep import environment
from samestep.errors import UserError
from samestep.run_folder import LOGS, errors_of, output_of, rank_file

_OTHERWISE = "--logs FOLDER says another"
_COLUMNS = 80  # of a terminal that doesn't say how many it has
_EVERY = 0.1  # seconds between two looks at the files
_BAR_EVERY = 5.0  # seconds between two pictures of a bar that redraws its line


class RankFiles(LogsSpecs):
    """FOLDER/HOST/round-0/rank-3.out and rank-3.err; every start of this host's ranks is a round."""

    def __init__(
        self, folder: Path | None, host: str, follower: "Follower | None", *, otherwise: str = _OTHERWISE
    ) -> None:
        """`folder`: None until the run's is known. `follower` shows what is written; None: nothing is shown.

        `otherwise`: what to do where the folder can't be.
        """
        super().__init__()
        self._chosen = folder
        self._host = host
        self._follower = follower
        self._otherwise = otherwise
        self._round = -1

    def of_run(self, folder: Path) -> None:
        """The run's folder, which takes the files where no other one was chosen for them."""
        self._chosen = self._chosen or folder / LOGS

    @property
    def _folder(self) -> Path:
        """The folder of this host's files."""
        assert self._chosen is not None
        return self._chosen / self._host

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    @property
    def here(self) -> Path:
        """The folder of the round that runs."""
        return self._folder / f"round-{self._round}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the elastic agent with the variables of each local rank, before it starts them.

        Raises UserError where the folder can't be.
        """
        try:
            self._make_folder()
        except OSError as error:
            raise UserError(
                f"{self._host}: what the ranks write can't be kept in {self._folder}: {error.strerror}; "
                f"{self._otherwise}"
            ) from None
        found = LogsDest()
        followed: dict[int, str] = {}
        for local_rank, variables in envs.items():
            rank = environment.ranks(variables)
            assert rank is not None
            output, errors, failure = (rank_file(self.here, rank.rank, kind) for kind in ("out", "err", "error.json"))
            found.stdouts[local_rank], found.stderrs[local_rank] = str(output), str(errors)
            found.error_files[local_rank] = str(failure)
            variables |= environment.error_file_at(failure)
            followed[rank.rank] = f"[{self._host} {rank.rank}] " if rank.world_size > 1 else ""
        if self._follower is not None:
            told = self._follower.follow(self.here, followed)
            for variables in envs.values():
                variables |= told
        return found

    def _make_folder(self) -> None:
        """A new one for this round."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._round += 1
            with suppress(FileExistsError):  # of an agent that was on this host before, or is there too
                self.here.mkdir()
                return


def _terminal(number: int) -> BinaryIO:
    """This process's standard output (1) or error (2), whatever stands in their places in Python."""
    return open(number, "wb", closefd=False)


class Follower:
    """Shows what ranks write into files, for as long as its `with` block lasts."""

    def __init__(self, *, prefixes: bool = True, bars: bool = False) -> None:
        """`prefixes`: before each line the rank that wrote it. `bars`: where standard error is a terminal, what ranks
        write there is shown as it comes, and the progress bar of rank 0 below it.
        """
        self._prefixes = prefixes
        self._streams = (_terminal(1), _terminal(2)) if bars else (sys.stdout.buffer, sys.stderr.buffer)
        self._bars = bars and self._streams[1].isatty()
        self._shown: Sequence[_Shown] = ()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._turn_to(())

    def follow(self, folder: Path, ranks: Mapping[int, str]) -> dict[str, str]:
        """Turn to the files of these ranks, when those before have been shown to their ends.

        `ranks`: what stands before each line of a rank. Returns variables for the ranks.
        """
        bar = rank_file(folder, 0, "bar") if self._bars and 0 in ranks else None
        shown: list[_Shown] = [_Bar(bar, self._streams[1])] if bar is not None else []
        for rank, prefix in ranks.items():
            for path, stream in zip((output_of(folder, rank), errors_of(folder, rank)), self._streams, strict=True):
                kind = _Bytes if self._bars and stream.isatty() else _Lines
                shown.append(kind(path, stream, prefix if self._prefixes else ""))
        self._turn_to(shown)
        if bar is None:
            return {}
        return environment.bar_at(bar, os.get_terminal_size(self._streams[1].fileno()).columns or _COLUMNS)

    def _turn_to(self, shown: "Sequence[_Shown]") -> None:
        """Show other files from now on, and what is left of the ones before."""
        with self._lock:
            for file in self._shown:
                file.show(last=True)
            self._shown = shown

    def _run(self) -> None:
        """A thread: ten looks a second at what was written."""
        while not self._over.wait(_EVERY):
            with self._lock:
                for file in self._shown:
                    file.show()


class _Shown(ABC):
    """A file that grows, of which more is shown again and again."""

    def __init__(self, path: Path, stream: BinaryIO, prefix: str = "") -> None:
        self.path = path
        self.stream = stream
        self._prefix = prefix.encode()
        self._at = 0  # bytes that were read

    def new(self) -> bytes:
        """What was written since; a file that has become shorter is read from its start."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self._at:
                self._at = 0
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        return data

    @abstractmethod
    def show(self, *, last: bool = False) -> None:
        """Show what is new; `last`: nothing more will come."""


class _Bytes(_Shown):
    """As it comes, on a terminal, where the next picture of a bar goes over the one before."""

    def show(self, *, last: bool = False) -> None:
        """Write what is new, as it is."""
        if data := self.new():
            _write(self.stream, data)


class _Bar(_Bytes):
    """A progress bar, which is no part of what a rank leaves behind."""

    def show(self, *, last: bool = False) -> None:
        super().show(last=last)
        if last:
            self.path.unlink(missing_ok=True)


class _Lines(_Shown):
    """Whole lines, each with the rank before it."""

    def __init__(self, path: Path, stream: BinaryIO, prefix: str = "") -> None:
        super().__init__(path, stream, prefix)
        self._rest = b""  # of a line that has no end yet
        self._bar_shown = 0.0

    def show(self, *, last: bool = False) -> None:
        """Write new lines, each with its rank; a line that isn't ended waits for its end."""
        *lines, self._rest = (self._rest + self.new()).split(b"\n")
        if self._rest and (last or self._bar_is_due()):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            write_lines(self.stream, [self._prefix + _last_picture(line) for line in lines])

    def _bar_is_due(self) -> bool:
        """Whether a bar that redraws its line has not been shown for 5 s."""
        if b"\r" not in self._rest or time.monotonic() - self._bar_shown < _BAR_EVERY:
            return False
        self._bar_shown = time.monotonic()
        return True


def _last_picture(line: bytes) -> bytes:
    """A line as a terminal shows it at its end: a progress bar goes back to its beginning and writes over it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def write_lines(stream: BinaryIO, lines: Sequence[bytes]) -> None:
    """Whole lines in one piece, so that other writers' lines stay whole. A reader who has gone is no error."""
    _write(stream, b"".join(line + b"\n" for line in lines))


def _write(stream: BinaryIO, data: bytes) -> None:
    """Write to the terminal, which may be gone."""
    with suppress(BrokenPipeError, ValueError):  # ValueError: closed
        stream.write(data)
        stream.flush()
