"""CPU affinity: the cores, NUMA node and accelerator that each rank of a host gets, and how many threads.

The machine says which cores ranks may have, their NUMA nodes, and the nodes of its accelerators.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from samestep import environment
from samestep.environment import VisibleDevices
from samestep.errors import UserError


def usable_processors() -> set[int]:
    """Return the ids of the hardware threads that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cores() -> int:
    """Count the hardware threads that this process may run on."""
    return len(usable_processors())


def threads_of(local_ranks: int, threads: int | None) -> int:
    """Return the threads of a rank: as requested, else the cores divided among the ranks."""
    return threads or environment.asked_threads() or max(1, cores() // local_ranks)


_NODES = "sys/devices/system/node"
_PROCESSORS = "sys/devices/system/cpu"
# One folder for each accelerator that NVIDIA's driver has, named by its address on the PCI bus.
_ACCELERATORS = "proc/driver/nvidia/gpus"


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core, as the ids of its hardware threads."""

    processors: tuple[int, ...]
    node: int = 0  # its NUMA node


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Cores and accelerators that the ranks of a host share."""

    cores: tuple[Core, ...]  # usable by this process, ordered by node
    # The NUMA node of each accelerator, in the order of local ranks; empty if unknown.
    devices: tuple[int, ...] = ()

    @property
    def nodes(self) -> list[int]:
        """The NUMA nodes with usable cores."""
        return sorted({core.node for core in self.cores})


def this_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Read what this process may use from the system's files; what they don't say counts as one NUMA node."""
    return describe(root, sorted(usable_processors()), environment.snapshot() if environ is None else environ)


def describe(root: Path, usable: Sequence[int], environ: Mapping[str, str]) -> Machine:
    """Build the machine from system files under `root`; `usable` are the hardware threads of this process."""
    node_of: dict[int, int] = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        node_of |= dict.fromkeys(_numbers(folder / "cpulist"), int(folder.name.removeprefix("node")))
    cores: dict[tuple[int, ...], Core] = {}
    for processor in usable:
        siblings = _numbers(root / _PROCESSORS / f"cpu{processor}/topology/thread_siblings_list")
        ours = tuple(number for number in siblings if number in usable) or (processor,)
        cores[ours] = Core(processors=ours, node=node_of.get(processor, 0))
    in_order = sorted(cores.values(), key=lambda core: (core.node, core.processors))
    nodes = {core.node for core in in_order}
    devices = _device_nodes(root, environment.visible_devices(environ))
    return Machine(cores=tuple(in_order), devices=devices if nodes.issuperset(devices) else ())


def _device_nodes(root: Path, visible: VisibleDevices | None) -> tuple[int, ...]:
    """Return the NUMA nodes of the visible accelerators, in their order; empty if one is unknown."""
    # PyTorch numbers accelerators of one kind by their PCI address.
    addresses = sorted(folder.name for folder in (root / _ACCELERATORS).glob("*:*"))
    if visible is not None:
        if not all(name.isdecimal() and int(name) < len(addresses) for name in visible.devices):
            return ()
        addresses = [addresses[int(name)] for name in visible.devices]
    nodes = [_numbers(root / f"sys/bus/pci/devices/{address}/numa_node") for address in addresses]
    return tuple(node[0] for node in nodes) if all(nodes) else ()


def _numbers(file: Path) -> tuple[int, ...]:
    """Read the numbers in a file such as "0-3,8"; empty if unreadable, or -1 (unknown)."""
    try:
        return tuple(numbers_of(file.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return ()


def numbers_of(text: str) -> list[int]:
    """Parse a list of numbers such as "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def list_of(numbers: Sequence[int]) -> str:
    """Format numbers as a list such as "0-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


BindChoice = Literal["auto", "none", "cores", "numa"]
BIND_CHOICES: tuple[str, ...] = get_args(BindChoice)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Cores, device and threads of one rank."""

    local_rank: int
    processors: tuple[int, ...] | None  # hardware threads that it may run on; None: all of this process's
    nodes: tuple[int, ...]  # NUMA nodes of those
    device: int | None  # its accelerator, if the nodes of accelerators are known
    threads: int


def check_choice(choice: str) -> None:
    """Raise UserError for an unknown way to bind ranks."""
    if choice not in BIND_CHOICES:
        raise UserError(f"--bind {choice}: it can be {', '.join(BIND_CHOICES)}")


def chosen(machine: Machine, ranks: int, choice: BindChoice, *, option: str = "--bind") -> tuple[BindChoice, str]:
    """Resolve `auto` to a way to bind ranks, and say why. Raises UserError if ranks can't be bound as requested.

    `option`: the origin of the choice: "--bind", or "run.bind:" of a job file.
    """
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
        raise UserError(f"{option} {choice}: this system doesn't bind processes to cores; use {option} none")
    if choice == "cores" and ranks > cores:
        raise UserError(f"{option} cores: {amount}; use {option} none, or {_count(cores, 'rank')} at most")
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
    bound = []
    for rank, (home, device) in enumerate(zip(homes, devices, strict=True)):
        cores = [core for core in machine.cores if core.node in home]
        there, own_index = sharing[home], before[home]
        before[home] += 1
        own = cores[own_index * len(cores) // there : (own_index + 1) * len(cores) // there]
        bound.append(
            Binding(
                local_rank=rank,
                processors=tuple(sorted(p for core in (own if way == "cores" else cores) for p in core.processors)),
                nodes=home,
                device=device,
                threads=max(1, len(own)),
            )
        )
    return bound


def _homes(machine: Machine, ranks: int, *, shared: bool) -> list[tuple[int, ...]]:
    """Assign NUMA nodes to ranks: those of their accelerators, else nodes in proportion to their cores."""
    nodes, cores = machine.nodes, Counter(core.node for core in machine.cores)
    homes = machine.devices[:ranks]
    if len(homes) == ranks and (shared or all(cores[node] >= here for node, here in Counter(homes).items())):
        return [(node,) for node in homes]
    if ranks < len(nodes):
        return [tuple(nodes[r * len(nodes) // ranks : (r + 1) * len(nodes) // ranks]) for r in range(ranks)]
    # The node in the middle of a rank's equal share of all cores. Middles are a core apart or more, so a node gets no
    # more ranks than it has cores, unless there are more ranks than cores.
    return [(machine.cores[(2 * rank + 1) * len(machine.cores) // (2 * ranks)].node,) for rank in range(ranks)]


def bind(binding: Binding) -> None:
    """Restrict this process, across exec, to its hardware threads."""
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
