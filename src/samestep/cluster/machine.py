"""Machine: the cores that ranks of this host may have, their NUMA nodes, and the nodes of its accelerators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep import environment
from samestep.cluster.cores import usable_processors
from samestep.environment import VisibleDevices

_NODES = "sys/devices/system/node"
_PROCESSORS = "sys/devices/system/cpu"
# One folder for each accelerator that NVIDIA's driver has, named by its address on the PCI bus.
_ACCELERATORS = "proc/driver/nvidia/gpus"


@dataclass(frozen=True, kw_only=True)
class Core:
    """A core, by the processors (hardware threads) through which the system uses it."""

    processors: tuple[int, ...]
    node: int = 0  # its NUMA node, whose memory is the nearest


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the ranks of a host share."""

    cores: tuple[Core, ...]  # that this process may use, node by node
    # The NUMA node of each accelerator, in the order in which local ranks take them; empty where it isn't known.
    devices: tuple[int, ...] = ()

    @property
    def nodes(self) -> list[int]:
        """The NUMA nodes that have cores for us."""
        return sorted({core.node for core in self.cores})


def this_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Read what this process may use from the system's files; what they don't say counts as one NUMA node."""
    return describe(root, sorted(usable_processors()), environment.snapshot() if environ is None else environ)


def describe(root: Path, usable: Sequence[int], environ: Mapping[str, str]) -> Machine:
    """The machine whose system files stand under `root`, of which the processors `usable` are for us."""
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
    """The NUMA nodes of the accelerators that are visible, in their order; empty where one isn't known."""
    # PyTorch numbers accelerators of one kind as they stand on the bus.
    addresses = sorted(folder.name for folder in (root / _ACCELERATORS).glob("*:*"))
    if visible is not None:
        if not all(name.isdecimal() and int(name) < len(addresses) for name in visible.devices):
            return ()
        addresses = [addresses[int(name)] for name in visible.devices]
    nodes = [_numbers(root / f"sys/bus/pci/devices/{address}/numa_node") for address in addresses]
    return tuple(node[0] for node in nodes) if all(nodes) else ()


def _numbers(file: Path) -> tuple[int, ...]:
    """The numbers in a file such as "0-3,8"; none where it can't be read, or says -1 for nobody knows."""
    try:
        return tuple(numbers_of(file.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return ()


def numbers_of(text: str) -> list[int]:
    """The numbers that a list such as "0-3,8" stands for."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def list_of(numbers: Sequence[int]) -> str:
    """Numbers as a list such as "0-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
