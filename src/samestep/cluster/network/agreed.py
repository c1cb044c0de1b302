"""Where the ranks of other hosts reach this one.

A host's own name is no help: on many machines it leads to the loopback (127.0.1.1), or to another network than the
one of the job. The way towards the host where the ranks meet does help, except on that host itself.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from samestep.cluster.network.address import address_towards, is_loopback

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "samestep-address-of-rank-"


def agreed_before_group(store: "dist.Store", rank: int, world_size: int, main: str) -> str:
    """This host's address for the ranks of others, agreed on through the store where all meet, on host `main`."""
    mine = address_towards(main)
    store.set(f"{_KEY}{rank}", mine)
    if not is_loopback(mine):
        return mine
    return _outwards(mine, (store.get(f"{_KEY}{other}").decode() for other in range(world_size)))


def agreed_in_group(main: str) -> str:
    """The same, by ranks that are in a process group already; every rank must ask."""
    import torch.distributed as dist

    mine = address_towards(main)
    all_ranks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    return _outwards(mine, all_ranks)


def _outwards(mine: str, all_ranks: Iterable[str]) -> str:
    """An address that leads out of this host, where any rank is on another host."""
    if not is_loopback(mine):
        return mine
    other = next((address for address in all_ranks if not is_loopback(address)), None)
    return mine if other is None else address_towards(other)
