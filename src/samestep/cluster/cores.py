"""The cores that this process may use, and how many threads each of a host's ranks starts on them."""

import os

from samestep import environment


def usable_processors() -> set[int]:
    """The system's numbers of the processors (hardware threads) that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cores() -> int:
    """Cores that this process may run on."""
    return len(usable_processors())


def threads_of(local_ranks: int, asked: int | None) -> int:
    """Threads a rank: as asked, else the cores shared out."""
    return asked or environment.asked_threads() or max(1, cores() // local_ranks)
