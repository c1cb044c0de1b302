"""Handshake: hosts check before the rendezvous that all are there and agree; later it passes on failures.

It uses one store for each job, served by the controller or the first host.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from samestep.errors import StartError, UserError, first_line
from samestep.launch import consistency, job_secret, store_address
from samestep.launch.failure import Failure
from samestep.launch.job_secret import JobSecret
from samestep.launch.network import reach, store_client
from samestep.launch.node_spec import NodeSpec
from samestep.launch.signed_store import (
    ForeignValueError,
    Name,
    Number,
    SignedStore,
    open_to_hosts,
    shortened,
    where_hosts_meet,
)
from samestep.progress import phases

_LOOK = 0.1  # seconds between two polls of the store
_APART = 0.5  # seconds between two attempts to connect
_ANSWER = 10.0  # seconds to wait for one response of the store

_FIRST = "samestep/first"
_REFUSED = "samestep/refused"
_COMPLETE = "samestep/complete"
_FAILED = "samestep/failed"
_ENDED = "samestep/ended"
_SUCCEEDED = "samestep/succeeded"
_LEFT = "samestep/left"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The agent that holds a node rank."""

    host: Name
    machine: Name
    process: Number


class Handshake:
    """One host's connection to the job's store.

    Keys in the job's store: a seat for each host that has come; `_FIRST`, what the first one told of itself;
    `_REFUSED`, why the job can't begin; `_COMPLETE`, set once enough have come. A host that comes reads the first
    one's facts and compares its own (`consistency`): versions, command, engine, sizes. Every wait ends after
    `start_timeout` seconds (300 unless told) with a message that names the hosts that are missing.
    """

    def __init__(self, spec: NodeSpec, secret: JobSecret | None = None) -> None:
        """Connect to the store, and serve it first if this host has to.

        Raises UserError for an impossible address or port and for a store of another secret, StartError if nothing
        answers in time.
        """
        assert spec.address is not None
        self._spec = spec
        self._secret = secret
        self._deadline = time.monotonic() + spec.timeouts.start_timeout
        self._came: set[int] = set()  # node ranks of hosts, as far as this one knows
        self._where = f"{spec.address}:{spec.port}"
        addresses = store_address.resolved(spec, self._deadline)
        # The address that this host uses: the serving host may resolve the name differently.
        self.address = store_address.to_serve_at(spec, addresses) if spec.serves else spec.address
        self._server = store_address.served(spec, self.address) if spec.serves else None
        if self._server is not None:
            open_to_hosts(self._server, secret)
        with phases.status(lambda: f"waiting for the job's store at {self._where}"):
            self._await_port(self.address, spec.port)
            self._store = self._reached()

    def _reached(self) -> SignedStore:
        """Connect to the store, in a thread with a time limit: PyTorch waits forever for the first response."""
        address, port = self.address, self._spec.port
        attempts: list[dist.TCPStore | Exception] = []

        def connect() -> None:
            """Thread: a connection to an address that drops packets can't be interrupted."""
            try:
                attempts.append(store_client(address, port, answer_within=_ANSWER))
            except (RuntimeError, ValueError) as error:
                attempts.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_ANSWER)
        store = attempts[0] if attempts else TimeoutError("no answer")
        if isinstance(store, Exception):
            raise self._no_store(store)
        try:
            return where_hosts_meet(store, self._secret, self._where)
        except ForeignValueError as error:
            self._show_seat(store)
            raise self._refused(error) from None
        except RuntimeError as error:
            raise self._no_store(error) from None

    def _no_store(self, error: Exception) -> StartError:
        return StartError(
            f"{self._spec.host}: what listens at {self._where} is no job's store ({first_line(error)}); use "
            "another --master-port"
        )

    def _show_seat(self, store: dist.TCPStore) -> None:
        """Take this host's seat with another secret than the others', so that they don't wait for this host."""
        with suppress(RuntimeError):
            if not store.check([_COMPLETE]):
                own = SignedStore(store, self._secret, scope="", where=self._where)
                store.compare_set(_seat(self._spec.node_rank), "", own.sealed("", self._own_seat()))

    def _refused(self, error: ForeignValueError) -> UserError:
        """Return the error of hosts that can't read each other's values: usually their secrets differ."""
        if self._spec.controlled:  # all have the secret that the starting machine sent
            return UserError(f"{self._spec.host}: {error}")
        return UserError(
            f"{self._spec.host}: {error}, and give all of them the same secret, by {job_secret.OPTION} or "
            f"{job_secret.VARIABLE}"
        )

    def _own_seat(self) -> Seat:
        return Seat(host=self._spec.host, machine=socket.gethostname(), process=os.getpid())

    def _await_port(self, address: str, port: int) -> None:
        """Wait until the store's port takes connections. Raises StartError after the deadline."""
        while True:
            try:
                with socket.create_connection((address, port), timeout=_ANSWER):
                    return
            except OSError as error:
                reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
            if time.monotonic() > self._deadline:
                raise StartError(
                    f"{self._spec.host} waited {self._spec.timeouts.start_timeout:.0f} s for the job's store "
                    f"at {self._where}: {reason}; {self._hint()}"
                )
            time.sleep(_APART)

    def _hint(self) -> str:
        """Suggest what may be wrong if the store doesn't answer."""
        if self._spec.controlled:
            return "a firewall may be in between, or --master-addr should be another address of the starting machine"
        return f"{self._spec.name_of(0)} is to serve it: has it been started, and is there a firewall?"

    def agree(self) -> None:
        """Wait until enough hosts are present and agree.

        Raises UserError if hosts differ, also in their secret, StartError if some are missing.
        """
        phases.say(f"waiting for {self._spec.size} hosts")
        with phases.status(lambda: f"waiting for hosts, {len(self._came)} of {self._spec.size} are there"):
            while True:
                try:
                    self._compare()
                    self._take_seat()
                    self._await_others()
                    return
                except ForeignValueError as error:
                    raise self._refused(error) from None
                except RuntimeError as error:  # raised by PyTorch's stores
                    self._reconnect(error)

    def _reconnect(self, error: Exception) -> None:
        """Reconnect to the store, until its host refuses connections. Raises StartError."""
        until = min(self._deadline, time.monotonic() + self._spec.timeouts.rejoin_timeout)
        while time.monotonic() < until:
            time.sleep(_APART)
            answer = reach(self.address, self._spec.port, within=1.0)
            if answer == "refuses":
                break
            if answer == "answers":
                with suppress(StartError):  # the connection may break again
                    self._store = self._reached()
                    return
        raise StartError(f"{self._spec.host} lost the job's store at {self._where}: {first_line(error)}")

    def _compare(self) -> None:
        """Compare this host with the first one. Raises UserError, or StartError for a late host of an elastic job."""
        spec = self._spec
        own = {"host": spec.host, **consistency.facts_of(spec)}
        theirs = self._store.claim(_FIRST, own, dict[str, str])
        if not theirs.keys() >= {"host", "job"}:
            raise self._store.foreign(_FIRST, "it names no host")
        unlike = consistency.difference(theirs, own)
        if unlike is None:
            return
        name, message = unlike
        complete = self._there(_COMPLETE)
        if name == "job":
            message = (
                f'the store at {self._where} is that of job "{theirs[name]}", which {theirs["host"]} began; '
                f'{spec.host} is of job "{own[name]}"; give all hosts of a job one --job-id, and each job a port'
            )
        elif not complete:
            self._store.write(_REFUSED, message)  # so that the others don't wait
        if complete and spec.elastic and spec.controlled:
            raise StartError(message)  # the job goes on; this host may retry after a repair
        raise UserError(message)

    def _take_seat(self) -> None:
        """Claim this host's node rank. A restarted agent takes its old seat again."""
        spec, seat = self._spec, self._own_seat()
        key = _seat(spec.node_rank)
        there = self._store.claim(key, seat, Seat)
        if there == seat:
            return
        if there.host != spec.host or _runs_here(there):
            raise UserError(
                f"node rank {spec.node_rank} of job {spec.job} is held by {there.host} "
                f"(process {there.process}) already, and {spec.host} comes with it too; "
                "give each host its own --node-rank, and each job its own --master-port"
            )
        self._store.write(key, seat)

    def _await_others(self) -> None:
        """Wait until enough hosts are present."""
        spec = self._spec
        came = self._came
        while True:
            came |= {
                number
                for number in range(spec.most)
                if number not in came and self._store.read(_seat(number), Seat) is not None
            }
            if len(came) >= spec.fewest:
                self._store.write(_COMPLETE, True)
                return
            if (refused := self._store.read(_REFUSED, str)) is not None:
                raise UserError(refused)
            if time.monotonic() > self._deadline:
                missing = [spec.name_of(number) for number in range(spec.most) if number not in came]
                raise StartError(
                    f"only {len(came)} of {spec.size} hosts came within {spec.timeouts.start_timeout:.0f} s: "
                    f"{', '.join(map(spec.name_of, sorted(came)))}; not {', '.join(missing)}"
                )
            time.sleep(_LOOK)

    def _there(self, key: str) -> bool:
        """Whether a host of the job has set a key."""
        return self._store.read_own(key, bool) is not None

    def tell_failure(self, failure: Failure) -> None:
        """Publish that this host's ranks have failed for good, which ends the job."""
        with suppress(RuntimeError):
            told = replace(failure, reason=shortened(failure.reason))
            self._store.write(_failure_of(self._spec.node_rank), told)
        self.end(f"a rank on {self._spec.host} failed")

    def end(self, reason: str) -> None:
        """Publish that the job is over, and why."""
        with suppress(RuntimeError):
            if self._store.read_own(_ENDED, str) is None:
                self._store.write(_ENDED, reason)

    def ended(self) -> str | None:
        """Return why the job is over; None if it isn't. Raises StartError if the store is gone."""
        try:
            return self._store.read_own(_ENDED, str)
        except RuntimeError as error:
            raise StartError(f"{self._spec.host} lost the job's store: {first_line(error)}") from None

    def tell_success(self) -> None:
        """Publish that the job has succeeded, for hosts that come later."""
        with suppress(RuntimeError):
            self._store.write(_SUCCEEDED, True)

    def succeeded(self, seconds: float) -> bool:
        """Whether a job that is over has succeeded; waits up to `seconds` for the message."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not (done := self._there(_SUCCEEDED)) and time.monotonic() < deadline:
                time.sleep(_LOOK)
            return done
        return False

    def failures(self) -> list[Failure] | None:
        """Return all published failures; None if the store is gone."""
        try:
            keys = [_failure_of(number) for number in range(self._spec.most)]
            return [failure for failure in self._store.read_all_own(keys, Failure) if failure is not None]
        except RuntimeError:
            return None

    def leave(self, seconds: float) -> None:
        """Publish that this host is done; the host with the store waits up to `seconds` for the others."""
        with suppress(RuntimeError):
            self._store.write(_left(self._spec.node_rank), True)
            numbers = range(self._spec.most)
            seats = self._store.read_all_own([_seat(number) for number in numbers], Seat)
            came = [number for number, seat in zip(numbers, seats, strict=True) if seat is not None]
            deadline = time.monotonic() + seconds
            while self._server is not None and time.monotonic() < deadline:
                if all(self._store.read_all_own([_left(number) for number in came], bool)):
                    break
                time.sleep(_LOOK)


def _seat(node_rank: int) -> str:
    return f"samestep/node/{node_rank}"


def _failure_of(node_rank: int) -> str:
    return f"{_FAILED}/{node_rank}"


def _left(node_rank: int) -> str:
    return f"{_LEFT}/{node_rank}"


def _runs_here(other: Seat) -> bool:
    """Whether an agent is another process of this machine that is still running."""
    if other.machine != socket.gethostname() or other.process == os.getpid():
        return False
    try:
        os.kill(other.process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
