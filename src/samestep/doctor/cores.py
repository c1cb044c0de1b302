"""Processors: the cores that this process may use, and the threads that it would start on them."""

import os
from collections.abc import Iterator
from pathlib import Path

from samestep import environment
from samestep.cluster.cores import cores as usable_cores
from samestep.doctor.finding import Asked, Finding, ok, warning

_CGROUPS = Path("/sys/fs/cgroup")


def cores(asked: Asked) -> Iterator[Finding]:
    """Cores of the machine, of this process's affinity, and of its cgroup's quota."""
    of_machine, usable, quota = os.cpu_count() or 1, usable_cores(), cpu_quota(_CGROUPS)
    values = {"machine": of_machine, "usable": usable, "quota": quota}
    if quota is not None and quota < usable:
        yield warning(
            "cores",
            f"a quota of {quota:g} cores, and {usable} that processes see: they start more threads than may run",
            f"--threads {max(1, int(quota))} for one process, or give the container more (docker run --cpus)",
            **values,
        )
    elif usable < of_machine:
        yield ok(
            "cores",
            f"{usable} of the machine's {of_machine} are for this process",
            "for more: taskset, or what the scheduler or the container was asked for",
            **values,
        )
    else:
        yield ok("cores", f"{usable}, all of the machine's", **values)


def cpu_quota(groups: Path) -> float | None:
    """Cores that the cgroup of this process may use at a time, version 2 or 1; None where there is no limit."""
    newer, quota, period = groups / "cpu.max", groups / "cpu/cpu.cfs_quota_us", groups / "cpu/cpu.cfs_period_us"
    try:
        if newer.is_file():
            words = newer.read_text(encoding="ascii").split()
        elif quota.is_file() and period.is_file():
            words = [quota.read_text(encoding="ascii").strip(), period.read_text(encoding="ascii").strip()]
        else:
            return None
        return int(words[0]) / int(words[1]) if words[0] not in ("max", "-1") else None
    except (OSError, ValueError, IndexError):
        return None


def threads(asked: Asked) -> Iterator[Finding]:
    """The threads that OMP_NUM_THREADS asks for, beside the cores."""
    wanted, usable = environment.asked_threads(), usable_cores()
    if wanted is None:
        yield ok("threads", "OMP_NUM_THREADS is not set: samestep shares the cores out among the ranks of a host")
    elif wanted > usable:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={wanted}, and there are {usable} cores",
            "unset OMP_NUM_THREADS, or set it to the cores of one rank",
            threads=wanted,
        )
    else:
        yield ok("threads", f"OMP_NUM_THREADS={wanted}: every rank has so many", threads=wanted)


def numa(asked: Asked) -> Iterator[Finding]:
    """The NUMA nodes of this machine, between which memory is slower."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        yield ok(
            "NUMA",
            f"{nodes} nodes: a rank is slower where its memory is another node's",
            "one rank or more a node, bound to it: numactl --cpunodebind=0 --membind=0 for ranks you start yourself",
            nodes=nodes,
        )
    else:
        yield ok("NUMA", "one node", nodes=max(nodes, 1))
