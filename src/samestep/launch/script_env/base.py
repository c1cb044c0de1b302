"""Contract: the variables and arguments that an engine's scripts expect, derived from a rank.

Some contracts must agree on addresses and ports before the scripts start. Ranks do so through a store that all of
them reach (`meeting`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from samestep.errors import UserError
from samestep.launchers import read_torchrun
from samestep.limits import MOST_RANKS, read_whole
from samestep.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank's numbers, environment, and options of --engine."""

    ranks: Ranks
    environ: Mapping[str, str]  # as set by the launcher
    threads: int
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> int:
        """Node rank of this rank's host."""
        variables = read_torchrun(self.environ)
        node = variables.node if variables is not None else None
        return self.ranks.rank // self.ranks.local_world_size if node is None else node

    @property
    def nodes(self) -> int:
        """Number of hosts; hosts of equal size are assumed if the launcher doesn't say."""
        variables = read_torchrun(self.environ)
        nodes = variables.nodes if variables is not None else None
        return -(-self.ranks.world_size // self.ranks.local_world_size) if nodes is None else nodes


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Variables and arguments for a script."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()  # before the script's own
    # Address and port of another rank's sidecar: the script is terminated when that rank has ended.
    sidecar: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How an engine's scripts learn their rank."""

    expected: Callable[[Rank], Expected]  # called by every rank, since some agree on addresses and ports
    options: Mapping[str, str] = field(default_factory=dict)  # name -> description of its value
    check: Callable[[Mapping[str, str]], None] = lambda options: None  # raises UserError for a wrong option
    package: str | None = None  # Python package that `expected` needs
    installs: str = ""  # command that installs it


def whole_number(name: str, text: str, least: int) -> int:
    """Parse an integer option. Raises UserError if it is no integer, or too small."""
    number = read_whole(text)
    if number is not None and least <= number <= MOST_RANKS:
        return number
    raise UserError(f"--engine: {name}={text}; it must be a whole number of {least} or more, {MOST_RANKS:,} at most")


# Longer than the slowest start of a rank: PyTorch's first import from a cold disk.
_PATIENCE = timedelta(minutes=5)


@contextmanager
def meeting(rank: Rank, address: str, port: int) -> Iterator["Store"]:
    """Share a store among all ranks until each has left it.

    It is the store that the elastic agent serves. Where the agent serves none, rank 0 serves one at the same address
    and port, which are free again for its script afterwards. Keys have a prefix for each start of the ranks.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    environ, size = rank.environ, rank.ranks.world_size
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size == 1:
        yield HashStore()
        return
    serves = not served and rank.ranks.rank == 0
    store = TCPStore(address, port, None, is_master=serves, timeout=_PATIENCE, wait_for_workers=False)
    round_of_ranks = f"{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{size}"
    named = PrefixStore(f"samestep/contract/{round_of_ranks}", store)
    yield named
    if named.add("left", 1) == size:
        named.set("all left", "")
    if serves:
        named.wait(["all left"])


def gathered(store: "Store", name: str, rank: Rank, value: str) -> list[str]:
    """Exchange a value through the store; return all ranks' values by rank. Collective."""
    store.set(f"{name}/{rank.ranks.rank}", value)
    return [store.get(f"{name}/{other}").decode() for other in range(rank.ranks.world_size)]


def addresses(store: "Store", rank: Rank, main: str) -> list[str]:
    """Return each rank's host address as other hosts reach it; the loopback on a single host. Collective."""
    from samestep.launch.network import LOOPBACK, agreed_before_group

    ranks = rank.ranks
    if ranks.local_world_size == ranks.world_size:
        return [LOOPBACK] * ranks.world_size
    return gathered(store, "address", rank, agreed_before_group(store, ranks.rank, ranks.world_size, main))
