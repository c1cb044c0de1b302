"""Where ranks agree on addresses and ports before their scripts start: a store that all of them reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from samestep.launch.script_env.base import Rank

if TYPE_CHECKING:
    from torch.distributed import Store

# Slower than the slowest start of a rank: the first import of PyTorch from a cold disk.
_PATIENCE = timedelta(minutes=5)


@contextmanager
def meeting(rank: Rank, address: str, port: int) -> Iterator["Store"]:
    """A store that all ranks share until each of them has left it.

    It is the one that the elastic agent serves; where that doesn't, rank 0 serves one at the same place, which is
    free again for its script afterwards. A name of its own keeps what is written apart from a later start's.
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


def gathered(store: "Store", name: str, rank: Rank, mine: str) -> list[str]:
    """What each rank wrote under a name, in the order of ranks. Every rank has to write."""
    store.set(f"{name}/{rank.ranks.rank}", mine)
    return [store.get(f"{name}/{other}").decode() for other in range(rank.ranks.world_size)]


def addresses(store: "Store", rank: Rank, main: str) -> list[str]:
    """The address of each rank's host by which the other hosts reach it; the loopback where there is one host."""
    from samestep.launch.network import LOOPBACK, agreed_before_group

    ranks = rank.ranks
    if ranks.local_world_size == ranks.world_size:
        return [LOOPBACK] * ranks.world_size
    return gathered(store, "address", rank, agreed_before_group(store, ranks.rank, ranks.world_size, main))
