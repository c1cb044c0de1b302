"""The hosts that tests run jobs on: apart from each other, breaking as real ones do, gone when they are done with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import testbed
from testbed import Cable, FailedError, Testbed, possible, why_not

REASON = why_not(ssh=False)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

PYTHON = [sys.executable, "-I", "-c"]
LISTEN = "import socket, time; s = socket.create_server(('', 9000)); s.listen(); c = s.accept()[0]; "
LISTEN += "print('accepted', flush=True); "
# Prints how long a connection took to be made and to end, and what ended it.
CALL = """
import socket, sys, time
began = time.monotonic()
try:
    call = socket.create_connection((sys.argv[1], 9000), timeout=float(sys.argv[2]))
    print("connected", flush=True)
    call.settimeout(float(sys.argv[-1]))
    print("ended" if call.recv(1) == b"" else "heard", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(2, ssh=False) as made:
        yield made


def wait_until(text: str, running: testbed.Running) -> None:
    until = time.monotonic() + 10
    while text not in running.text:
        assert time.monotonic() < until, running.text
        time.sleep(0.02)


def test_a_host_has_a_name_an_address_and_processes_of_its_own(bed: Testbed) -> None:
    host_a, host_b = bed.hosts
    here = host_a.run(["sh", "-c", "hostname; cat /etc/hostname; ls /sys/class/net; getent hosts host-b; echo $$"])
    name, same, *devices, other, number = here.stdout.split("\n")[:-1]
    assert (name, same) == ("host-a", "host-a")
    assert sorted(devices) == ["eth0", "lo"]
    assert other.split() == [host_b.address, "host-b"]
    assert int(number) < 1000
    host_a.run(["touch", "/dev/shm/a", "/run/a"])
    assert host_b.run(["ls", "/dev/shm/a", "/run/a"], check=False).returncode == 2
    assert not Path("/dev/shm/a").exists()
    assert os.uname().nodename != "host-a"


def test_hosts_share_files_unless_one_gets_a_folder_of_its_own(bed: Testbed, tmp_path: Path) -> None:
    host_a, host_b = bed.hosts
    (tmp_path / "file").write_text("here")
    assert host_a.run(["cat", "file"], cwd=tmp_path).stdout == "here"
    host_b.own_folder(tmp_path)
    assert host_b.run(["ls", str(tmp_path)]).stdout == ""
    assert host_a.run(["ls", str(tmp_path)]).stdout == "file\n"


def test_a_command_is_given_variables_and_its_failure_is_told(bed: Testbed) -> None:
    host = bed["host-a"]
    assert host.run(["sh", "-c", "echo $SAID"], env={"SAID": "so"}).stdout == "so\n"
    with pytest.raises(FailedError, match=r"host-a: sh -c .*ended with exit code 3(.|\n)*no luck"):
        host.run(["sh", "-c", "echo no luck >&2; exit 3"])
    with pytest.raises(FailedError, match="exit code 4"):
        host.start(["sh", "-c", "exit 4"]).finish(10)
    with pytest.raises(TimeoutError, match=r"more than 2 s and printed:\nbegun"):
        host.run(["sh", "-c", "echo begun; sleep 60"], timeout=2)
    asleep = []
    for process in psutil.Process(host.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended, and is still to be reaped
            if process.cmdline() == ["sleep", "60"]:
                asleep.append(process)
    _, left = psutil.wait_procs(asleep, timeout=10)  # killed, and perhaps not yet gone
    assert not left


def test_a_crash_ends_connections_and_a_cut_power_is_silent(bed: Testbed) -> None:
    host_a, host_b = bed.hosts
    for end, heard in ((host_b.crash, "ended"), (host_b.power_off, "TimeoutError")):
        server = host_b.start([*PYTHON, LISTEN + "time.sleep(60)"])
        host_b.wait_for(9000)
        call = host_a.start([*PYTHON, CALL, "host-b", "1.5"])
        wait_until("connected", call)
        wait_until("accepted", server)
        end()
        assert not host_b.is_up
        assert call.finish(10).split()[1] == heard
        with pytest.raises(RuntimeError, match=r"host-b is down; call boot\(\)"):
            host_b.run(["true"])
        host_b.boot()
        assert host_b.run(["hostname", "-i"]).stdout.split() == [host_b.address]
    with pytest.raises(RuntimeError, match="host-b is up already"):
        host_b.boot()


# Says something ten times a second for so many seconds, and prints "done" where it was heard to the end.
TALK = """
import socket, sys, time
call = socket.create_connection((sys.argv[1], 9000), timeout=5)
for _ in range(int(10 * float(sys.argv[2]))):
    call.sendall(b".")
    assert call.recv(1) == b"."
    time.sleep(0.1)
print("done")
"""
ANSWER = "import itertools; [c.sendall(c.recv(1)) for _ in itertools.count()]"


@pytest.mark.slow
def test_what_is_left_of_a_dead_host_does_not_speak_for_the_one_that_is_booted(bed: Testbed) -> None:
    host_a, host_b = bed.hosts
    host_b.start([*PYTHON, LISTEN + "time.sleep(60)"])
    host_b.wait_for(9000)
    wait_until("connected", host_a.start([*PYTHON, CALL, "host-b", "60"]))
    host_b.power_off()
    host_a.crash()  # its kernel goes on telling host-b that the connection has ended, since nobody answers
    host_b.boot()
    host_a.boot()
    server = host_a.start([*PYTHON, LISTEN + ANSWER])
    host_a.wait_for(9000)
    assert host_b.run([*PYTHON, TALK, "host-a", "8"]).stdout == "done\n"
    server.stop()


def test_a_cable_is_pulled_and_put_back(bed: Testbed) -> None:
    host_a, host_b = bed.hosts
    server = host_b.start([*PYTHON, LISTEN + "time.sleep(60)"])
    host_b.wait_for(9000)
    host_b.unplug()
    assert host_a.run([*PYTHON, CALL, "host-b", "0.5"]).stdout.split()[0] == "TimeoutError"
    host_b.plug()
    assert host_a.run([*PYTHON, CALL, "host-b", "20", "0.5"]).stdout.split()[0] == "connected"
    server.stop()


def seconds_for(bytes_sent: int, bed: Testbed) -> float:
    """How long bytes take from host-b to host-a."""
    host_a, host_b = bed.hosts
    receive = "import socket, time; c = socket.create_connection(('host-b', 9000)); t = time.monotonic()\n"
    receive += "while c.recv(65536): pass\nprint(time.monotonic() - t)"
    server = host_b.start([*PYTHON, LISTEN + f"c.sendall(bytes({bytes_sent}))"])
    host_b.wait_for(9000)
    seconds = float(host_a.run([*PYTHON, receive]).stdout)
    server.finish(10)
    return seconds


@pytest.mark.slow
def test_a_slow_link_carries_what_it_may(bed: Testbed) -> None:
    size = 2_000_000  # bytes; 1.6 s at 10 Mbit/s, less what the limit lets pass in a burst
    bed.limit("10mbit")
    assert 1.2 < seconds_for(size, bed) < 6
    bed.limit(None)
    assert seconds_for(size, bed) < 1


@pytest.mark.slow
def test_a_cable_between_racks_takes_its_time() -> None:
    with Testbed(2, racks=2, cable=Cable(delay_ms=60), ssh=False) as far:
        host_a, host_b = far.hosts
        host_b.start([*PYTHON, LISTEN + "c.close()"])
        host_b.wait_for(9000)
        told = host_a.run([*PYTHON, CALL, "host-b", "5"]).stdout.split()
        assert told[:2] == ["connected", "ended"]
        assert float(told[2]) > 2 * 0.12  # there and back, once to connect and once to hear of the end
        assert seconds_for(2_000_000, far) < 10


def test_two_racks_without_delay_and_losses_are_survived() -> None:
    with Testbed(2, racks=2, cable=Cable(loss=0.02), ssh=False) as lossy:
        assert seconds_for(500_000, lossy) < 20


def test_two_testbeds_do_not_see_each_other(bed: Testbed) -> None:
    with Testbed(2, ssh=False) as other:
        bed["host-b"].start([*PYTHON, LISTEN])
        bed["host-b"].wait_for(9000)
        answer = other["host-a"].run([*PYTHON, CALL, "host-b", "0.5"]).stdout.split()
        assert answer[0] == "ConnectionRefusedError"  # by its own host-b
        assert bed["host-a"].run([*PYTHON, CALL, "host-b", "20", "0.5"]).stdout.split()[0] == "connected"


MADE = """
import sys, time
from testbed import Cable, Testbed
with Testbed(2, racks=2, cable=Cable(delay_ms=1), ssh=False) as bed:
    sleeper = bed["host-a"].start(["setsid", "sleep", "1000"])
    print(*[host.pid for host in bed.hosts], flush=True)
    print(bed.folder, flush=True)
    {then}
"""


def processes_of(test: str) -> list[psutil.Process]:
    """What was started with a variable that says so."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TESTBED_TEST") == test and process.pid != os.getpid():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.parametrize(("then", "number"), [("raise RuntimeError('planted')", None), ("time.sleep(60)", "SIGKILL")])
def test_nothing_is_left_of_a_failing_and_of_a_killed_run(
    then: str, number: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def mounts() -> list[str]:
        of_tests = str(tmp_path_factory.getbasetemp().parent)  # where other tests mount small disks
        return [line for line in Path("/proc/self/mounts").read_text().splitlines() if of_tests not in line]

    before = mounts()
    test = f"{os.getpid()}-{number}"
    path = str(Path(testbed.__file__).parents[1])
    run = subprocess.Popen(
        [sys.executable, "-c", MADE.format(then=then)],
        env={**os.environ, "TESTBED_TEST": test, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    pids = [int(pid) for pid in run.stdout.readline().split()]
    folder = Path(run.stdout.readline().strip())
    assert len(pids) == 2
    if number is not None:
        assert len(processes_of(test)) >= 8  # the run; bridges, cable, hosts and what runs on them
        run.send_signal(signal.Signals[number])
    run.communicate(timeout=20)
    until = time.monotonic() + 10
    while (left := processes_of(test)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    assert mounts() == before
    if number is None:
        assert not folder.exists()
    else:
        assert folder.exists()  # files stay where a run is killed, and nothing else
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()


def test_why_there_can_be_no_hosts_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = why_not.__wrapped__
    monkeypatch.setattr(possible, "program", lambda name: None if name in ("sshd", "tc") else name)
    assert ask(ssh=True) == "iproute2, openssh-server is not installed; run tools/cluster-packages"
    assert ask(ssh=False) == "iproute2 is not installed; run tools/cluster-packages"
    monkeypatch.undo()
    monkeypatch.setattr(possible, "_TRIAL", "echo no such thing >&2; exit 1")
    assert ask(ssh=False) == "the kernel refuses namespaces, bridges or mounts: no such thing"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ask() == "hosts are made by root alone"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ask() == "hosts are made of Linux namespaces, and this is no Linux"
    with pytest.raises(ValueError, match="9 hosts in 1 racks; 1 to 8"):
        Testbed(9, ssh=False)
