"""Waiting: a thread that asks how many hosts wait to join, so that nobody else has to wait for the answer."""

import threading
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

_APART = 0.5  # seconds; PyTorch's rendezvous itself looks once a second


class Waiting:
    """Asks for the time of a round."""

    def __init__(self, rendezvous: RendezvousHandler) -> None:
        self.number = 0
        self._rendezvous = rendezvous
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; what is being asked is waited for, since the rendezvous serves one thread at a time."""
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(_APART):
            with suppress(RendezvousError, DistError):  # whether the store is there is found out elsewhere
                self.number = self._rendezvous.num_nodes_waiting()
