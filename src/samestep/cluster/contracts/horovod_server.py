"""The server where Horovod's ranks meet; as a program, `ADDRESS SLOTS`, it runs until its standard input ends."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

from samestep.cluster.contracts.horovod import Slot


@contextmanager
def serving(address: str, slots: Sequence[Slot]) -> Iterator[tuple[str, int]]:
    """Serve on a free port of one address, as `horovodrun` does on every one of its host; where it is."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer  # pyright: ignore[reportMissingImports]

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, False)
    server.init([SimpleNamespace(**slot) for slot in slots])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def main(address: str, slots: str) -> None:
    with serving(address, json.loads(slots)) as (_, port):
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
