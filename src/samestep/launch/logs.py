"""Logs of ranks: a file for each rank and stream, and all of them on the terminal with a prefix for each rank."""

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import BinaryIO, Self

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from samestep import environment, file_errors
from samestep.errors import UserError
from samestep.progress import phases
from samestep.run_folder import LOGS, errors_of, output_of, rank_file

_OTHERWISE = "use --logs FOLDER"
_COLUMNS = 80  # of a terminal that doesn't report its width
_EVERY = 0.1  # seconds between polls of the files
_BAR_EVERY = 5.0  # seconds between printed states of a progress bar


def say(text: str) -> None:
    """Print a line of this host's agent on standard error."""
    print(f"samestep: {text}", file=sys.stderr, flush=True)


class RankFiles(LogsSpecs):
    """The folders FOLDER/HOST/round-0/rank-3.out and rank-3.err; each start of this host's ranks is a round."""

    def __init__(
        self, folder: Path | None, host: str, follower: "Follower | None", *, otherwise: str = _OTHERWISE
    ) -> None:
        """`folder`: None until the run's is known. `follower` prints what is written; None: nothing is printed."""
        super().__init__()
        self._chosen = folder
        self._host = host
        self._follower = follower
        self._otherwise = otherwise
        self._round = -1
        self._started = False  # whether ranks have been started

    def of_run(self, folder: Path) -> None:
        """Use the run's folder, unless another one was chosen."""
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
        """The folder of the current round."""
        return self._folder / f"round-{self._round}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files of a round; called by the elastic agent with the variables of each local rank.

        Raises UserError if the folder can't be created.
        """
        try:
            self._make_folder()
            self._make_files(envs.values())
        except OSError as error:
            reason = file_errors.reason_of(error, self._folder, elsewhere=self._otherwise)
            text = f"{self._host}: what the ranks write can't be kept in {self._folder}: {reason}"
            if not self._started:
                raise UserError(text) from None
            self._chosen = Path(mkdtemp(prefix="samestep-logs-"))  # stays for the user
            print(f"samestep: {text}; from now on it is in {self._chosen}", file=sys.stderr, flush=True)
            self._make_folder()
        self._started = True
        logs = LogsDest()
        followed: dict[int, str] = {}
        for local_rank, variables in envs.items():
            rank = environment.ranks(variables)
            assert rank is not None
            output, errors, failure = (rank_file(self.here, rank.rank, kind) for kind in ("out", "err", "error.json"))
            logs.stdouts[local_rank], logs.stderrs[local_rank] = str(output), str(errors)
            logs.error_files[local_rank] = str(failure)
            variables |= environment.error_file_at(failure)
            followed[rank.rank] = f"[{self._host} {rank.rank}] " if rank.world_size > 1 else ""
        if self._follower is not None:
            told = self._follower.follow(self.here, followed)
            for variables in envs.values():
                variables |= told
        return logs

    def _make_files(self, environs: Iterable[Mapping[str, str]]) -> None:
        """Create the files of the ranks' output, which fails here instead of in the ranks."""
        for variables in environs:
            rank = environment.ranks(variables)
            assert rank is not None
            for file in (output_of(self.here, rank.rank), errors_of(self.here, rank.rank)):
                file.touch()

    def _make_folder(self) -> None:
        """Create a new folder for this round."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._round += 1
            with suppress(FileExistsError):  # of a former, or another, agent on this host
                self.here.mkdir()
                return


def _terminal(number: int) -> BinaryIO:
    """Open this process's standard output (1) or error (2), even if sys.stdout or sys.stderr is replaced."""
    return open(number, "wb", closefd=False)


class Follower:
    """Prints what ranks write to their log files, within a `with` block."""

    def __init__(self, *, prefixes: bool = True, bars: bool = False) -> None:
        """`prefixes`: start each line with its rank. `bars`: if stderr is a terminal, copy output as it comes."""
        self._prefixes = prefixes
        self._streams = (_terminal(1), _terminal(2)) if bars else (sys.stdout.buffer, sys.stderr.buffer)
        self._bars = bars and self._streams[1].isatty() and environment.terminal_draws()
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
        """Follow the files of these ranks, after printing the rest of the previous ones.

        `ranks`: prefix of each rank's lines. Returns variables for the ranks.
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
        """Print the rest of the previous files, and follow others."""
        with self._lock:
            for file in self._shown:
                file.show(last=True)
            self._shown = shown

    def _run(self) -> None:
        """Thread: polls the files ten times a second."""
        while not self._over.wait(_EVERY):
            with self._lock:
                for file in self._shown:
                    file.show()


class _Shown(ABC):
    """A growing file whose new content is printed."""

    def __init__(self, path: Path, stream: BinaryIO, prefix: str = "") -> None:
        self.path = path
        self.stream = stream
        self._prefix = prefix.encode()
        self._at = 0  # offset of the next read

    def new(self) -> bytes:
        """Read the new content; a truncated file is read from its start."""
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
        """Print the new content; `last`: nothing more will come."""


class _Bytes(_Shown):
    """Copies output unchanged to a terminal, where a progress bar overwrites itself."""

    def show(self, *, last: bool = False) -> None:
        """Write what is new, as it is."""
        if data := self.new():
            _write(self.stream, data)


class _Bar(_Bytes):
    """A progress bar's file, which is removed at the end."""

    def show(self, *, last: bool = False) -> None:
        super().show(last=last)
        if last:
            self.path.unlink(missing_ok=True)


class _Lines(_Shown):
    """Prints whole lines, each with its rank's prefix."""

    def __init__(self, path: Path, stream: BinaryIO, prefix: str = "") -> None:
        super().__init__(path, stream, prefix)
        self._rest = b""  # incomplete last line
        self._bar_shown = 0.0

    def show(self, *, last: bool = False) -> None:
        """Print new lines with their prefix; an incomplete line waits for its end."""
        *lines, self._rest = (self._rest + self.new()).split(b"\n")
        if self._rest and (last or self._bar_is_due()):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            write_lines(self.stream, [self._prefix + _last_picture(line) for line in lines])

    def _bar_is_due(self) -> bool:
        """Whether the incomplete line is a progress bar that has not been printed for 5 s."""
        if b"\r" not in self._rest or time.monotonic() - self._bar_shown < _BAR_EVERY:
            return False
        self._bar_shown = time.monotonic()
        return True


def _last_picture(line: bytes) -> bytes:
    """Return a line's final state on a terminal: what follows the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def write_lines(stream: BinaryIO, lines: Sequence[bytes]) -> None:
    """Write lines in one call, so that other writers don't split them. A closed reader is no error."""
    _write(stream, b"".join(line + b"\n" for line in lines))


def _write(stream: BinaryIO, data: bytes) -> None:
    """Write to the terminal, which may be closed, or a file on a full disk: the ranks go on."""
    phases.heard()
    with suppress(OSError, ValueError):  # ValueError: closed
        stream.flush()
        try:
            descriptor = stream.fileno()
        except OSError:  # a stream of Python's own
            stream.write(data)
            return
        # Not by the stream, which would keep what it can't write and fail with it at the end of the process.
        while data:
            data = data[os.write(descriptor, data) :]
