"""Main memory: the limit of a cgroup, and freed memory, which a rank on a CPU keeps for the next step.

An allocator that the user has set up is left as it is.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from samestep.launch.memory import cgroup_limit

# Page faults while three blocks of 8 MB are written and freed 40 times, after the allocator has settled.
FREES = """
import os, resource, sys
from samestep.launch.memory import give_back_freed_memory, keep_freed_memory

kept = keep_freed_memory(os.environ) if sys.argv[1] == "keep" else None

def blocks():
    for _ in range(40):
        several = [bytearray(8_000_000) for _ in range(3)]
        del several

blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

held = resident()
give_back_freed_memory()
print(kept, faults, held - resident())
"""


def frees(how: str, **variables: str) -> tuple[str, int, int]:
    """Whether memory is kept, the page faults of 40 rounds, and the bytes that are given back at the end."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-c", FREES, how], capture_output=True, text=True, timeout=60, env={**plain, **variables}
    )
    assert done.returncode == 0, done.stderr
    kept, faults, given_back = done.stdout.split()
    return kept, int(faults), int(given_back)


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is not glibc")
def test_freed_memory_is_kept_and_given_back_when_asked() -> None:
    kept, faults, given_back = frees("keep")
    assert kept == "True"
    assert faults < 200
    assert given_back > 20_000_000


def test_an_allocator_that_the_user_has_set_up_is_left_alone() -> None:
    # With a threshold of 1 MB every round maps its three blocks again: 3 x 8 MB in pages of 4 KB.
    kept, faults, _ = frees("keep", MALLOC_TRIM_THRESHOLD_="1000000", MALLOC_MMAP_THRESHOLD_="1000000")
    assert kept == "False"
    assert faults > 40 * 3 * 8_000_000 // 4096 // 2


GIB = 2**30


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", f"{2 * GIB}\n", 2 * GIB),
        ("memory.max", "max\n", None),
        ("memory.max", f"{16 * GIB}\n", None),
        ("memory/memory.limit_in_bytes", f"{2 * GIB}\n", 2 * GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),  # 2^63 - 1 in whole pages of 4 KiB
        ("memory/memory.limit_in_bytes", "9223372036854710272\n", None),  # and of 64 KiB
        ("memory/memory.limit_in_bytes", f"{8 * GIB}\n", None),
        ("memory/memory.limit_in_bytes", f"{8 * GIB - 4096}\n", 8 * GIB - 4096),
        ("none", "", None),
    ],
)
def test_a_limit_is_one_below_the_memory_of_the_host(
    file: str, text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB, available=8 * GIB))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="ascii")
    assert cgroup_limit(tmp_path) == limit
