"""Disks that fail, for tests: small ones, and errors of the system at the calls of one process."""

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_tasks import Unscored
from torch import Tensor

import samestep
from samestep.checkpoint import save


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a size such as 128k; skips the test without the right to."""
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


class Refusing:
    """`os.fsync` that refuses some of its calls with an error.

    `at`: those of files and folders of which a path has one of these parts; `times`: as many of them, None: all.
    """

    def __init__(self, number: int, *, at: Sequence[str] = (".saving",), times: int | None = None) -> None:
        self._number, self._at, self._times = number, at, times
        self._sync = os.fsync
        self.refused = 0

    def __call__(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        path = str(Path(f"/proc/self/fd/{number}").readlink())
        if any(part in path for part in self._at) and (self._times is None or self.refused < self._times):
            self.refused += 1
            raise OSError(self._number, os.strerror(self._number))
        self._sync(file)


class RefusedOnRank(Unscored):
    """A task during which the disk refuses a rank's writing, from a step on, so many times; None: always.

    `once`: a file that keeps it from happening again when the ranks have been started again.
    """

    def __init__(self, *, rank: int, step: int, times: int | None, once: Path, number: int = errno.EIO) -> None:
        super().__init__()
        self.rank, self.step, self.times, self.number, self.once = rank, step, times, number, once
        self.calls = 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        save.PAUSES = (0.05, 0.1)
        if dist.get_rank() == self.rank and self.calls == self.step and not self.once.exists():
            self.once.touch()
            os.fsync = Refusing(self.number, times=self.times)
        self.calls += 1
        return super().loss(output, batch)
