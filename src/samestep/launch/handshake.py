"""Handshake: hosts check before the rendezvous that all are there and agree; later it passes on failures.

It uses one store for each job, served by the controller or the first host.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from samestep.errors import StartError, UserError, first_line
from samestep.launch import consistency, store_address
from samestep.launch.failure import Failure
from samestep.launch.network import reach, store_client
from samestep.launch.node_spec import NodeSpec
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


class Handshake:
    """One host's connection to the job's store.

    Keys in the job's store: a seat for each host that has come; `_FIRST`, what the first one told of itself;
    `_REFUSED`, why the job can't begin; `_COMPLETE`, set once enough have come. A host that comes reads the first
    one's facts and compares its own (`consistency`): versions, command, engine, sizes. Every wait ends after
    `start_timeout` seconds (300 unless told) with a message that names the hosts that are missing.
    """

    def __init__(self, spec: NodeSpec) -> None:
        """Connect to the store, and serve it first if this host has to.

        Raises UserError for an impossible address or port, StartError if nothing answers in time.
        """
        assert spec.address is not None
        self._spec = spec
        self._deadline = time.monotonic() + spec.timeouts.start_timeout
        self._came = 0  # hosts, as far as this one knows
        self._where = f"{spec.address}:{spec.port}"
        found = store_address.resolved(spec, self._deadline)
        # The address that this host uses: the serving host may resolve the name differently.
        self.address = store_address.to_serve_at(spec, found) if spec.serves else spec.address
        self._server = store_address.served(spec, self.address) if spec.serves else None
        with phases.status(lambda: f"waiting for the job's store at {self._where}"):
            self._await_port(self.address, spec.port)
            self._store = self._reached()

    def _reached(self) -> dist.TCPStore:
        """Connect to the store, in a thread with a time limit: PyTorch waits forever for the first response."""
        address, port = self.address, self._spec.port
        found: list[dist.TCPStore | Exception] = []

        def connect() -> None:
            """Thread: a connection to an address that drops packets can't be interrupted."""
            try:
                found.append(store_client(address, port, answer_within=_ANSWER))
            except (RuntimeError, ValueError) as error:
                found.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_ANSWER)
        store = found[0] if found else TimeoutError("no answer")
        if not isinstance(store, Exception):
            return store
        raise StartError(
            f"{self._spec.host}: what listens at {self._where} is no job's store ({first_line(store)}); use "
            "another --master-port"
        )

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

        Raises UserError if hosts differ, StartError if some are missing.
        """
        phases.say(f"waiting for {self._spec.size} hosts")
        with phases.status(lambda: f"waiting for hosts, {self._came} of {self._spec.size} are there"):
            while True:
                try:
                    self._compare()
                    self._take_seat()
                    self._await_others()
                    return
                except RuntimeError as error:  # raised by PyTorch's stores
                    self._reconnect(error)

    def _reconnect(self, error: Exception) -> None:
        """Reconnect to the store, until its host refuses connections. Raises StartError."""
        until = min(self._deadline, time.monotonic() + self._spec.timeouts.rejoin_timeout)
        while time.monotonic() < until:
            time.sleep(_APART)
            found = reach(self.address, self._spec.port, within=1.0)
            if found == "refuses":
                break
            if found == "answers":
                with suppress(StartError):  # the connection may break again
                    self._store = self._reached()
                    return
        raise StartError(f"{self._spec.host} lost the job's store at {self._where}: {first_line(error)}")

    def _compare(self) -> None:
        """Compare this host with the first one. Raises UserError, or StartError for a late host of an elastic job."""
        spec = self._spec
        mine = {"host": spec.host, **consistency.facts_of(spec)}
        theirs = json.loads(self._store.compare_set(_FIRST, "", json.dumps(mine)))
        found = consistency.difference(theirs, mine)
        if found is None:
            return
        name, message = found
        complete = self._there(_COMPLETE)
        if name == "job":
            message = (
                f'the store at {self._where} is that of job "{theirs[name]}", which {theirs["host"]} began; '
                f'{spec.host} is of job "{mine[name]}"; give all hosts of a job one --job-id, and each job a port'
            )
        elif not complete:
            self._store.set(_REFUSED, message)  # so that the others don't wait
        if complete and spec.elastic and spec.controlled:
            raise StartError(message)  # the job goes on; this host may retry after a repair
        raise UserError(message)

    def _take_seat(self) -> None:
        """Claim this host's node rank. A restarted agent takes its old seat again."""
        spec = self._spec
        mine = json.dumps({"host": spec.host, "machine": socket.gethostname(), "process": os.getpid()})
        seat = _seat(spec.node_rank)
        there = self._store.compare_set(seat, "", mine).decode()
        if there == mine:
            return
        other = json.loads(there)
        if other["host"] != spec.host or _runs_here(other):
            raise UserError(
                f"node rank {spec.node_rank} of job {spec.job} is held by {other['host']} "
                f"(process {other['process']}) already, and {spec.host} comes with it too; "
                "give each host its own --node-rank, and each job its own --master-port"
            )
        self._store.set(seat, mine)

    def _await_others(self) -> None:
        """Wait until enough hosts are present."""
        spec = self._spec
        while True:
            came = [number for number in range(spec.most) if self._there(_seat(number))]
            self._came = len(came)
            if len(came) >= spec.fewest:
                self._store.set(_COMPLETE, "")
                return
            if self._there(_REFUSED):
                raise UserError(self._store.get(_REFUSED).decode())
            if time.monotonic() > self._deadline:
                missing = [spec.name_of(number) for number in range(spec.most) if number not in came]
                raise StartError(
                    f"only {len(came)} of {spec.size} hosts came within {spec.timeouts.start_timeout:.0f} s: "
                    f"{', '.join(map(spec.name_of, came))}; not {', '.join(missing)}"
                )
            time.sleep(_LOOK)

    def _there(self, key: str) -> bool:
        return self._store.check([key])

    def tell_failure(self, failure: Failure) -> None:
        """Publish that this host's ranks have failed for good, which ends the job."""
        with suppress(RuntimeError):
            number = self._store.add(_FAILED, 1)
            self._store.set(f"{_FAILED}/{number}", json.dumps(asdict(failure)))
        self.end(f"a rank on {self._spec.host} failed")

    def end(self, reason: str) -> None:
        """Publish that the job is over, and why."""
        with suppress(RuntimeError):
            self._store.compare_set(_ENDED, "", reason)

    def ended(self) -> str | None:
        """Return why the job is over; None if it isn't. Raises StartError if the store is gone."""
        try:
            return self._store.get(_ENDED).decode() if self._there(_ENDED) else None
        except RuntimeError as error:
            raise StartError(f"{self._spec.host} lost the job's store: {first_line(error)}") from None

    def tell_success(self) -> None:
        """Publish that the job has succeeded, for hosts that come later."""
        with suppress(RuntimeError):
            self._store.set(_SUCCEEDED, "")

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
        found = []
        try:
            for number in range(1, self._store.add(_FAILED, 0) + 1):
                if self._store.check([f"{_FAILED}/{number}"]):
                    found.append(Failure(**json.loads(self._store.get(f"{_FAILED}/{number}"))))
        except RuntimeError:
            return None
        return found

    def leave(self, seconds: float) -> None:
        """Publish that this host is done; the host with the store waits up to `seconds` for the others."""
        with suppress(RuntimeError):
            left = self._store.add(_LEFT, 1)
            came = sum(self._there(_seat(number)) for number in range(self._spec.most))
            deadline = time.monotonic() + seconds
            while self._server is not None and left < came and time.monotonic() < deadline:
                time.sleep(_LOOK)
                left = self._store.add(_LEFT, 0)


def _seat(node_rank: int) -> str:
    return f"samestep/node/{node_rank}"


def _runs_here(other: Mapping[str, Any]) -> bool:
    """Whether an agent is another process of this machine that is still running."""
    if other["machine"] != socket.gethostname() or other["process"] == os.getpid():
        return False
    try:
        os.kill(other["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
