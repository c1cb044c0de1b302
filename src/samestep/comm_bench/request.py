"""Arguments of `samestep comm`, checked before ranks start.

A size of 4MB is one of 4 MiB, as in nccl-tests, whose sizes are powers of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep import environment
from samestep.comm.collectives import COLLECTIVES
from samestep.comm.measure import DTYPE
from samestep.comm.transports import TABLE
from samestep.errors import UserError, closest
from samestep.launch.affinity import cores
from samestep.launch.device import accelerators, check_devices
from samestep.launch.environments.registry import check_not_alone
from samestep.launch.memory import available_memory
from samestep.ranks import DeviceChoice
from samestep.sizes import binary_size, parse_size

# 1 KiB to 256 MiB by powers of 4.
USUAL = tuple(1024 * 4**power for power in range(10))

AUTO = "auto"  # the transport that a job gets here


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse a list of sizes such as "1KiB,1MiB" to bytes, ascending, without duplicates. Raises UserError."""
    sizes = [_parse(word.strip()) for word in text.split(",")]
    return tuple(sorted(set(sizes)))


def _parse(word: str) -> int:
    """Bytes of a size such as 1KiB or 4MB. Raises UserError for anything else."""
    size = parse_size(word, kilo=1024)
    if size is None:
        raise UserError(f'--sizes: "{word}" is no size; use a number of bytes, KiB, MiB or GiB, such as 1KiB,1MiB')
    if size != int(size) or size < 1:
        raise UserError(f'--sizes: "{word}" is {size:g} bytes; use a whole number of bytes, 1 or more')
    return int(size)


def in_words(sizes: Sequence[int]) -> str:
    """Describe a range of sizes: how many, the first and the last."""
    if len(sizes) == 1:
        return binary_size(sizes[0])
    return f"{len(sizes)} sizes, {binary_size(sizes[0])} to {binary_size(sizes[-1])}"


# Buffers of the largest message that a rank holds: input, output, and one of the back end.
_COPIES = 3
_OF_A_PROCESS = 300 * 2**20  # bytes of a process that has imported PyTorch


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """What `samestep comm` measures: collectives, message sizes, device and time."""

    collectives: tuple[str, ...] = tuple(COLLECTIVES)
    sizes: tuple[int, ...] = USUAL  # seconds of samples for one row
    device: DeviceChoice = "auto"
    seconds: float = 0.3  # that the samples of one row may take


def check_collectives(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once. Raises UserError with the closest one for a name that is none."""
    for name in names:
        if name not in COLLECTIVES:
            raise UserError(f'unknown collective "{name}"; {closest(name, COLLECTIVES)}')
    return tuple(dict.fromkeys(names))


def check_transport(name: str) -> str:
    """A transport's name, or auto. Raises UserError with the closest one for a name that is none."""
    if name != AUTO and name not in TABLE:
        raise UserError(f'unknown transport "{name}"; {closest(name, [AUTO, *TABLE])}')
    return name


def processes_of(option: int | None, device: DeviceChoice) -> int:
    """Return the number of ranks: those that a launcher has started, or those to start here.

    Raises UserError if they are fewer than 2, or more than this host's accelerators.
    """
    ranks = environment.ranks()
    if ranks is not None:
        if option is not None and option != ranks.world_size:
            raise UserError(
                f"--processes is {option}, and a launcher has started {ranks.world_size} ranks; leave it out"
            )
        if ranks.world_size < 2:
            raise UserError("a launcher has started 1 rank, and a collective needs 2; start 2 ranks or more")
        return ranks.world_size
    check_not_alone(environment.snapshot())
    there = accelerators() if device == "auto" else 0
    processes = max(2, there or cores()) if option is None else option
    if processes < 2:
        raise UserError(f"--processes is {processes}, and a collective needs 2; use --processes 2")
    check_devices(processes, device)
    return processes


def check_sizes(request: CommRequest, processes: int) -> None:
    """Raise UserError for sizes with less than one float32 a rank, or beyond this host's memory."""
    smallest = processes * DTYPE.itemsize
    if request.sizes[0] < smallest:
        raise UserError(
            f"--sizes: {binary_size(request.sizes[0])} gives each of {processes} ranks less than one float32; "
            f"use {smallest} bytes or more"
        )
    ranks = environment.ranks()
    local = processes if ranks is None else ranks.local_world_size
    largest = request.sizes[-1]
    needed, there = local * (_COPIES * largest + _OF_A_PROCESS), available_memory()
    if needed > there:
        fitting = max(0, there // local - _OF_A_PROCESS) // _COPIES
        remedy = f"use sizes up to {binary_size(fitting)}" if fitting >= smallest else "use fewer processes"
        raise UserError(
            f"--sizes: {binary_size(largest)} on {local} processes of this host needs {binary_size(needed)} of "
            f"memory, and {binary_size(there)} are free; {remedy}"
        )
