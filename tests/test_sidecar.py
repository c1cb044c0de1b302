"""Sidecars: another rank that is not reached is a failure, and a host that falls silent is noticed."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import free_port

from samestep.errors import StartError
from samestep.launch.script_env import sidecar


def test_a_command_whose_other_rank_is_not_reached_fails_and_is_not_run(tmp_path: Path) -> None:
    port = free_port()
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    ended = subprocess.run(
        sidecar.until_rank_ends("127.0.0.1", port, program), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "samestep: the first rank, whose end this host's rank waits for, is not reached at "
        f"127.0.0.1:{port}: Connection refused; has it ended already, or is a firewall in between?\n"
    )
    assert not (tmp_path / "ran").exists()


def test_no_answer_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(StartError, match=r"is not reached at 10\.9\.0\.1:7: no answer; has it ended"):
        sidecar.connect("10.9.0.1", 7)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such option")
def test_a_silent_host_is_noticed_within_a_minute() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        sidecar.connect("127.0.0.1", listening.getsockname()[1]) as connection,
    ):
        idle, between, tries = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.gettimeout() is None
    assert idle + between * tries < 60
