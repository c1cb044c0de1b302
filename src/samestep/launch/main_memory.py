"""Main memory: what the machine has, what of it is free, and what this process's cgroup may hold."""

from pathlib import Path


def available_memory() -> int | None:
    """Bytes that a process can still have here; None where the system doesn't say."""
    free, limit = meminfo().get("MemAvailable"), cgroup_limit()
    return min((each for each in (free, limit) if each is not None), default=None)


def meminfo(file: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; nothing where the system has no such file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    sizes = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def cgroup_limit(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's cgroup may hold, version 2 or 1; None where there is no limit."""
    for file in (groups / "memory.max", groups / "memory/memory.limit_in_bytes"):
        try:
            return int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None
