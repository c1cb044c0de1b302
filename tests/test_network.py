"""Who holds a port, as far as the user may see it."""

import errno
import os
import socket
from pathlib import Path

import pytest

from samestep.launch import network
from samestep.launch.network import NOBODY_LISTENS, why_not

pytestmark = pytest.mark.quick

TAKEN = OSError(errno.EADDRINUSE, "Address already in use")
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:735A 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid}        0 31337 1 0 100 0 0 10 0
   1: 0100007F:735B 00000000:0000 01 00000000:00000000 00:00000000 00000000 {uid}        0 31338 1 0 100 0 0 10 0
"""


def test_a_process_of_this_user_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        why = why_not(listening.getsockname()[1], TAKEN)
    comm = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert why is not None
    assert why.startswith(f"is taken by {comm} (process {os.getpid()} of ")


@pytest.mark.parametrize(("uid", "user"), [(0, "root"), (3000017, "user 3000017")])
def test_of_another_users_process_the_user_is_named(
    uid: int, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TABLE.format(uid=uid), encoding="ascii")
    monkeypatch.setattr(network, "_PROC", tmp_path)  # a system on which no process lets this one look at it
    assert why_not(0x735A, TAKEN) == f"is taken by a process of {user}"
    assert why_not(0x735B, TAKEN) == f"is taken by {NOBODY_LISTENS}"


def test_a_port_may_be_roots_alone_or_not_be_the_reason() -> None:
    assert why_not(80, PermissionError(errno.EACCES, "Permission denied")) == "is one that only root may listen on"
    assert why_not(29500, OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")) is None
