"""Checks of the network: this host's name, the other hosts and their clocks, and ports."""

import errno
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from samestep import environment
from samestep.doctor.findings import SSH_PORT, DoctorFinding, ExaminationRequest, HostAddress, ok, problem, warning
from samestep.launch.network import LOOPBACK, NOBODY_LISTENS, holders, is_ours

_PATIENCE = 3.0  # seconds for one connection
_TRIES = 3
_CLOCKS_APART = 1.0  # seconds from which time stamps of logs and checkpoints mislead


def own_name(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check that this host's name resolves to one of its addresses; gloo listens there for ranks of other hosts."""
    interface = environment.gloo_interface()
    if interface is not None:
        yield _chosen(interface)
        return
    name = socket.gethostname()
    addresses = _addresses(name)
    values: dict[str, Any] = {"name": name, "addresses": addresses}
    report = problem if request.hosts else ok
    remedy = "a line in /etc/hosts with the address that the other hosts use, or GLOO_SOCKET_IFNAME=<interface>"
    if not addresses:
        yield report("own name", f"{name} does not resolve; for one host that is enough", remedy, **values)
    elif not any(map(is_ours, addresses)):
        text = f"{name} resolves to {addresses[0]}, which is no address of this host"
        yield (problem if request.hosts else warning)("own name", text, remedy, **values)
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        text = f"{name} resolves to the loopback ({addresses[0]}): enough for one host, and no other reaches it"
        yield report("own name", text, remedy, **values)
    else:
        yield ok("own name", f"{name} resolves to {', '.join(addresses)}", **values)


def _chosen(interface: str) -> DoctorFinding:
    """Check the interface that GLOO_SOCKET_IFNAME names; gloo then doesn't resolve the host's name."""
    there = [name for _, name in socket.if_nameindex()]
    if interface in there:
        return ok("own name", f"not asked for: gloo listens on {interface}, by GLOO_SOCKET_IFNAME")
    text = f"GLOO_SOCKET_IFNAME is {interface}, and there is no such interface"
    return problem("own name", text, f"unset it, or choose of {', '.join(there)}", interface=interface)


def _addresses(name: str) -> list[str]:
    """Resolve a host name; empty if that fails."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def reached(host: HostAddress) -> Iterator[DoctorFinding]:
    """Check another host: its name, its port, the round-trip time, and its clock."""
    subject = f"host {host}"
    try:
        address = str(socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        remedy = "a line in /etc/hosts or in the name server, or its address instead of its name"
        yield problem(subject, f"the name does not resolve: {error.strerror}", remedy, reached=False)
        return
    try:
        seconds = statistics.median(_round_trip(host) for _ in range(_TRIES))
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
        yield problem(
            subject,
            f"{address}, port {host.port}: {reason}",
            f"see that the host is up, that something listens there (sshd for {SSH_PORT}), and that no firewall "
            "is in between",
            address=address,
            reached=False,
        )
        return
    values: dict[str, Any] = {"address": address, "reached": True, "round_trip_seconds": seconds}
    yield ok(subject, f"{address}, port {host.port}: there and back in {seconds * 1e3:.2f} ms", **values)
    yield _clock(host)


def _round_trip(host: HostAddress) -> float:
    """Measure the seconds to open a connection, one round trip."""
    began = time.perf_counter()
    with socket.create_connection((host.name, host.port), timeout=_PATIENCE):
        return time.perf_counter() - began


def _clock(host: HostAddress) -> DoctorFinding:
    """Compare another host's clock with this one's over SSH (seconds); the error is half the round trip."""
    subject = f"clock of {host}"
    ssh = shutil.which("ssh")
    if ssh is None:
        return ok(subject, "not compared: there is no ssh here")
    # BatchMode: ssh fails on an unknown host key instead of asking at the terminal.
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_PATIENCE:.0f}", "-p", str(host.port)]
    began = time.time()
    try:
        done = subprocess.run(
            [ssh, *options, "--", host.name, "date +%s.%N"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * _PATIENCE,
            check=True,
        )
        ended = time.time()
        theirs = float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ok(subject, "not compared: SSH without a password does not work", "ssh-copy-id, for start by SSH too")
    apart, unsure = theirs - (began + ended) / 2, (ended - began) / 2
    text = f"{apart:+.2f} s from this host's, give or take {unsure:.2f} s"
    values: dict[str, Any] = {"seconds_apart": apart, "unsure_seconds": unsure}
    if abs(apart) - unsure > _CLOCKS_APART:
        return warning(subject, text, "let all hosts follow one time server: chrony or systemd-timesyncd", **values)
    return ok(subject, text, **values)


def loopback(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check that a socket can listen on the loopback and be reached, as ranks of one host need."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listening:
            address = listening.getsockname()
            with socket.create_connection(address, timeout=5):
                yield ok("loopback", f"a socket listens on {LOOPBACK} and is reached")
    except OSError as error:
        yield problem(
            "loopback",
            f"no socket can listen on {LOOPBACK} and be reached: {error}",
            "ip link set lo up; in a sandbox, allow TCP on the loopback",
        )


def port(request: ExaminationRequest) -> Iterator[DoctorFinding]:
    """Check whether the given port is free, and report which process holds it."""
    if request.port is None:
        return
    subject = f"port {request.port}"
    reason = _taken(request.port)
    if reason is None:
        yield ok(subject, "free")
    elif reason == errno.EACCES:
        yield problem(subject, "only root may listen on it", "use a port from 1024 on", held_by=[])
    else:
        held_by = holders(request.port)
        who = ", ".join(map(str, held_by)) or NOBODY_LISTENS
        yield problem(
            subject,
            f"taken by {who}",
            "another port, or end that process; jobs that samestep starts take free ports by themselves",
            held_by=[{"pid": holder.pid, "name": holder.name, "user": holder.user} for holder in held_by],
        )


def _taken(number: int) -> int | None:
    """Return the errno for which no process can listen on a port at every address; None if it is free."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, number))
                probe.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno  # any other error: this host lacks the address family
    return None
