"""Binding: which cores, NUMA node and accelerator each rank of a host gets, and how many threads."""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from samestep.cluster.machine import Machine, list_of
from samestep.errors import UserError

BindChoice = Literal["auto", "none", "cores", "numa"]
BIND_CHOICES: tuple[str, ...] = get_args(BindChoice)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What one rank of a host gets."""

    local_rank: int
    processors: tuple[int, ...] | None  # hardware threads that it may run on; None: all of this process's
    nodes: tuple[int, ...]  # NUMA nodes of those
    device: int | None  # its accelerator, where the system says what is near it
    threads: int


def check_choice(choice: str) -> None:
    """Raise UserError unless there is such a way to bind ranks."""
    if choice not in BIND_CHOICES:
        raise UserError(f"--bind {choice}: it can be {', '.join(BIND_CHOICES)}")


def chosen(machine: Machine, ranks: int, choice: BindChoice) -> tuple[BindChoice, str]:
    """The way to bind that a choice comes down to, and why. Raises UserError where ranks can't be bound so."""
    cores = len(machine.cores)
    amount = f"{_count(ranks, 'rank')} and {_count(cores, 'core')} on this host"
    bindable = hasattr(os, "sched_setaffinity")
    if choice == "auto":
        if not bindable:
            return "none", "this system doesn't bind processes to cores"
        if ranks > cores:
            return "none", f"{amount}: the system shares the cores out"
        return "cores", f"{amount}: each rank has its own"
    if choice != "none" and not bindable:
        raise UserError(f"--bind {choice}: this system doesn't bind processes to cores; --bind none would do")
    if choice == "cores" and ranks > cores:
        raise UserError(f"--bind cores: {amount}; --bind none, or {_count(cores, 'rank')} at most, would do")
    return choice, "as asked"


def bindings(machine: Machine, ranks: int, choice: BindChoice = "auto") -> list[Binding]:
    """What each of a host's ranks gets.

    `cores`: cores of its own, of one NUMA node where the ranks are as many as the nodes or more; a core's hardware
    threads stay together, and a rank has a thread for each core. `numa`: all cores of a NUMA node, which the ranks
    of that node share. A rank stands on its accelerator's node where the system says which that is. Raises UserError
    where the ranks can't be bound so.
    """
    way, _ = chosen(machine, ranks, choice)
    near = len(machine.devices) >= ranks
    devices = [index if near else None for index in range(ranks)]
    if way == "none":
        threads = max(1, sum(len(core.processors) for core in machine.cores) // ranks)
        return [
            Binding(local_rank=rank, processors=None, nodes=tuple(machine.nodes), device=device, threads=threads)
            for rank, device in enumerate(devices)
        ]
    homes = _homes(machine, ranks, shared=way == "numa")
    sharing, before = Counter(homes), Counter[tuple[int, ...]]()
    found = []
    for rank, (home, device) in enumerate(zip(homes, devices, strict=True)):
        cores = [core for core in machine.cores if core.node in home]
        there, mine = sharing[home], before[home]
        before[home] += 1
        own = cores[mine * len(cores) // there : (mine + 1) * len(cores) // there]
        found.append(
            Binding(
                local_rank=rank,
                processors=tuple(sorted(p for core in (own if way == "cores" else cores) for p in core.processors)),
                nodes=home,
                device=device,
                threads=max(1, len(own)),
            )
        )
    return found


def _homes(machine: Machine, ranks: int, *, shared: bool) -> list[tuple[int, ...]]:
    """The NUMA nodes of each rank: its accelerator's, or the nodes shared out in proportion to their cores."""
    nodes, cores = machine.nodes, Counter(core.node for core in machine.cores)
    wanted = machine.devices[:ranks]
    if len(wanted) == ranks and (shared or all(cores[node] >= here for node, here in Counter(wanted).items())):
        return [(node,) for node in wanted]
    if ranks < len(nodes):
        return [tuple(nodes[r * len(nodes) // ranks : (r + 1) * len(nodes) // ranks]) for r in range(ranks)]
    # The node in which the middle of a rank's equal share of all cores lies. Middles stand a core apart or more, so
    # no node gets more ranks than it has cores, unless there are more ranks than cores.
    return [(machine.cores[(2 * rank + 1) * len(machine.cores) // (2 * ranks)].node,) for rank in range(ranks)]


def bind(binding: Binding) -> None:
    """Let this process, and what it becomes, run on its processors alone."""
    if binding.processors is not None:
        os.sched_setaffinity(0, binding.processors)


def in_words(binding: Binding) -> str:
    """Such as "0-3,8-11 of NUMA node 0, 4 threads": cores by the system's numbers of their hardware threads."""
    where = "any core"
    if binding.processors is not None:
        nodes = f"NUMA node{'s' if len(binding.nodes) > 1 else ''} {list_of(binding.nodes)}"
        where = f"{list_of(binding.processors)} of {nodes}"
    return f"{where}, {_count(binding.threads, 'thread')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
