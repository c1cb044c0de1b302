"""Which of some named hosts this machine is."""

from collections.abc import Sequence

from samestep.cluster.network.address import is_address, is_ours

_HERE = ("localhost", "127.0.0.1", "::1")


def which(names: Sequence[str], own: str) -> int | None:
    """The position of this machine, called `own`, among hosts' names or addresses; None where it is none of them.

    Names are compared whole, then without their domains. No name server is asked: that may take seconds a name.
    """
    for index, name in enumerate(names):
        if name in (own, *_HERE):
            return index
    short = [name if is_address(name) else name.partition(".")[0] for name in names]
    if short.count(own.partition(".")[0]) == 1:
        return short.index(own.partition(".")[0])
    return next((index for index, name in enumerate(names) if is_address(name) and is_ours(name)), None)
