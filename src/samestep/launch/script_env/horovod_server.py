"""The server where Horovod's ranks meet; as a program, `ADDRESS SLOTS`, it runs until its standard input ends."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from samestep.launch.script_env.horovod import Slot


@contextmanager
def serving(address: str, slots: Sequence[Slot]) -> Iterator[tuple[str, int]]:
    """Serve on a free port of one address, as `horovodrun` does on every one of its host; where it is."""
    from horovod.runner.http.http_server import RendezvousHTTPServer  # pyright: ignore[reportMissingImports]

    server = RendezvousHTTPServer((address, 0), _handler(), False)
    server.init([SimpleNamespace(**slot) for slot in slots])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _handler() -> type:
    """Horovod's own, except that one group of ranks that has met does not undo the count of another.

    Ranks tell when they have found each other, and when all of a group have, their addresses are forgotten. Horovod
    0.28 forgets then too who of other groups has told. Their addresses stay, and where Horovod starts once more, a
    rank may be given one of the first start, at which no process listens.
    """
    from horovod.runner.http.http_server import RendezvousHandler  # pyright: ignore[reportMissingImports]

    class Handler(RendezvousHandler):
        def do_DELETE(self) -> None:  # noqa: N802
            server: Any = self.server
            group, _, rank = self.path.removeprefix("/").partition("/")
            if group not in server.scope_size:
                super().do_DELETE()
                return
            with server.finished_list_lock, server.cache_lock:
                met = server.finished_list[group]
                if rank not in met:  # it asks again where the answer was lost
                    met.append(rank)
                if len(met) == server.scope_size[group]:
                    met.clear()
                    server.cache.pop(group, None)
            self.send_status_code(200)

    return Handler


def main(address: str, slots: str) -> None:
    with serving(address, json.loads(slots)) as (_, port):
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
