"""The elastic agent's rendezvous for a job of one host: a store on the loopback, and no other host to wait for.

PyTorch's own c10d rendezvous listens on every address of the host. It also keeps one store for all rounds, so that
ranks of a later round can read what ranks of an earlier one left there; here every round has a store of its own.
"""

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from samestep.launch.network import LOOPBACK, store_at

BACKEND = "samestep-one-host"


class SingleNodeRendezvous(RendezvousHandler):
    """One agent, which is complete by itself. Its store is also where the ranks meet."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Store | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = store = store_at(LOOPBACK)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return SingleNodeRendezvous(parameters.run_id)


def register() -> None:
    """Make the rendezvous known to PyTorch by its name; a second call changes nothing."""
    rendezvous_handler_registry.register(BACKEND, _create)
