"""Who can reach a job's ranks, which files are for whom, and that nothing is run that only should be read."""

import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from launching import free_port
from listening import elsewhere, listening

from samestep import environment
from samestep.launch.network import address_towards, loopback_interface, store_at
from samestep.launch.world import join

TESTS = Path(__file__).parent

JOB = """
recipe:
  task: {tests}/small_tasks.py:Failing
  args: {{way: slow, marker: {marker}}}
  batch: 16
  steps: 50
run: {{layout: {layout}, engine: {engine}, device: cpu, folder: {folder}, check: false, log: []}}
"""


@contextmanager
def running(tmp_path: Path, start: list[str], layout: str, engine: str) -> Iterator[psutil.Process]:
    """A job whose ranks train."""
    job, marker = tmp_path / "job.yaml", tmp_path / "marker"
    text = JOB.format(tests=TESTS, marker=marker, layout=layout, engine=engine, folder=tmp_path / "run")
    job.write_text(text, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    process = psutil.Popen(
        [*start, "-m", "samestep", "train", str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not marker.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                pytest.fail(f"the job did not get to its third step: {process.communicate()}")
            time.sleep(0.05)
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.mark.parametrize(
    ("layout", "engine"),
    [("dp2", "horovod"), pytest.param("dp2 fsdp2", "native", marks=pytest.mark.slow)],
)
def test_ranks_of_one_host_listen_on_its_loopback_alone(tmp_path: Path, layout: str, engine: str) -> None:
    """Of two replicas on the native engine test_launch.py sees it, in a job that it then stops."""
    if engine != "native":
        pytest.importorskip(engine)
    with running(tmp_path, [sys.executable], layout, engine) as process:
        sockets = listening(process)
    assert len(sockets) >= 3  # the store, and each rank's own
    assert elsewhere(sockets) == []


@pytest.fixture(autouse=True)
def no_sockets_of_earlier_tests() -> None:
    """Stores that nothing but each other refers to would be closed in the middle of a test."""
    gc.collect()


def test_a_socket_for_every_address_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert len(elsewhere(listening(psutil.Process()))) == 1


def test_a_process_that_works_alone_listens_on_the_loopback_alone() -> None:
    before = len(listening(psutil.Process()))
    with join(alone=True, device="cpu"):
        sockets = listening(psutil.Process())
        assert len(sockets) > before
        assert elsewhere(sockets) == []
        assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_interface_that_a_user_chose_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    if not there:
        pytest.skip("this host has no address but its loopback's")
    interface, address = next(iter(there.items()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    with join(alone=True, device="cpu"):
        assert [each for each, _ in elsewhere(listening(psutil.Process()))] == [address]


def test_only_a_launcher_that_says_so_puts_all_ranks_on_one_host() -> None:
    several = {"RANK": "0", "WORLD_SIZE": "4"}
    for variables, one_host in (
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({}, False),
    ):
        ranks = environment.ranks({**several, **variables})
        assert ranks is not None
        assert ranks.one_host is one_host


def test_ranks_of_several_hosts_are_left_the_interface_of_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank alone of a job whose launcher doesn't say how many share its host.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **where}.items():
        monkeypatch.setenv(name, value)
    with join(device="cpu"):
        assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_store_serves_at_one_address() -> None:
    before = listening(psutil.Process())
    store = store_at("127.0.0.1")
    sockets = listening(psutil.Process())
    assert len(sockets) == len(before) + 1
    assert elsewhere(sockets) == []
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address.address, store.port), timeout=5)


def test_the_address_towards_a_host_is_one_of_this_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET:
                assert address_towards(address.address) == address.address


@pytest.mark.slow
def test_files_have_the_permissions_that_the_user_asked_for(tmp_path: Path) -> None:
    job = TESTS.parent / "examples" / "regression.yaml"
    run, found, picture = tmp_path / "run", tmp_path / "found.json", tmp_path / "layout.svg"
    # One process that does it all: each start of Python loads PyTorch again.
    program = f"""
import sys
from samestep.cli.main import main
def run(*words):
    assert main(list(words)) == 0
if __name__ == "__main__":
    run("train", {str(job)!r}, "--layout", "dp2", "--device", "cpu", "--folder", {str(run)!r},
        "--set", "recipe.steps=3", "--set", "recipe.epochs=null")
    run("layout", "dp2", "--svg", {str(picture)!r})
    run("doctor", {str(run)!r}, "--json", {str(found)!r})
"""
    script = tmp_path / "script.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, umask=0o027)
    assert done.returncode == 0, done.stderr
    script.unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"metrics.jsonl", "report.json", "model.safetensors", "layout.svg"}
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in files}
    assert set(modes.values()) == {0o640}, modes
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert run in folders
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o750}
