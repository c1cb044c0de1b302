"""Starts the runs of a script's proof by forking: what the script imports is imported once, not in each rank."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

from samestep import environment, subprocess_group
from samestep.errors import UserError
from samestep.progress import phases
from samestep.script_proof.imports import imports_of
from samestep.script_proof.runs import LOGS, ScriptProof, ScriptStart, Starter, with_variables
from samestep.script_proof.torchrun import variables_of
from samestep.subprocess_group import CommandOutcome

_SERVER = ("-m", "samestep.script_proof.server")
_GRACE = 1.0  # seconds that other ranks have to end, once one has failed


@contextmanager
def forking(proof: ScriptProof, otherwise: Starter) -> Iterator[Starter]:
    """A starter that forks ranks on this host, where that is the same as starting them; else `otherwise`.

    There are two servers, of which one has rank 0 and the other one all other ranks: Python hashes strings by a seed
    of the process, and an order of samples that follows it differs between ranks.
    """
    if proof.engine != "torch" or proof.launch or not hasattr(os, "fork"):
        yield otherwise
        return
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(proof)) for _ in range(2)]
        title = "importing what the script imports"
        phases.say(title)
        with phases.status(lambda: title):
            fit = [server.is_ready(proof.time_limit) for server in servers]
        yield _Forked(servers).start if all(fit) else otherwise


class _Server:
    """One process that forks ranks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self.answers = process.stdin, process.stdout
        self._buffered = b""

    def ask(self, **request: Any) -> None:
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()

    def is_ready(self, limit: float) -> bool:
        """Wait until the server has imported; False if it can't fork, or ended."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            for answer in self.read(until - time.monotonic()):
                return answer["ready"]
            if self._process.poll() is not None:
                return False
        return False

    def read(self, wait: float) -> list[dict[str, Any]]:
        """The answers that are there, or come within so many seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            if not selector.select(max(0.0, wait)):
                return []
        *lines, self._buffered = (self._buffered + os.read(self.answers.fileno(), 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


@contextmanager
def _server(proof: ScriptProof) -> Iterator[_Server]:
    """A server that imports what the commands of a proof import, with the variables that they have in common."""
    commands = [with_variables(command) for command in (proof.script, proof.alone, proof.then) if command is not None]
    alike = all(variables == commands[0][0] for variables, _ in commands)
    imports = [one for _, command in commands for one in imports_of(command)] if alike else []
    start_variables = {**variables_of(proof.device), **(commands[0][0] if alike else {})}
    with environment.given(start_variables), subprocess_group.started([sys.executable, *_SERVER]) as process:
        server = _Server(process)
        server.ask(imports=imports, cpu=proof.device == "cpu")
        yield server


@dataclass(kw_only=True)
class _Run:
    """The ranks of a run as they start and end."""

    ranks: dict[int, int] = field(default_factory=dict)  # process -> rank
    codes: dict[int, int] = field(default_factory=dict)  # rank -> how it ended, in the order of the ends
    failed_at: float | None = None

    def notice(self, answer: Mapping[str, Any]) -> None:
        if "started" in answer:
            self.ranks[answer["started"]] = answer["rank"]
        elif answer["ended"] in self.ranks:
            self.codes[self.ranks[answer["ended"]]] = answer["code"]
            if answer["code"] and self.failed_at is None:
                self.failed_at = time.monotonic()


class _Forked:
    """Starts runs one after the other."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers

    def start(self, starts: Sequence[ScriptStart], proof: ScriptProof) -> list[CommandOutcome]:
        outcomes: list[CommandOutcome] = []
        for start in starts:
            phases.say(f"{start.name}: {start.title}")
            with phases.status(start.status):
                outcomes.append(self._one(start, proof))
            if outcomes[-1].code != 0:
                break
        return outcomes

    def _one(self, start: ScriptStart, proof: ScriptProof) -> CommandOutcome:
        began = time.monotonic()
        run = _Run()
        (start.place / LOGS).mkdir()
        try:
            self._ask(start, proof)
            until = began + proof.time_limit
            while len(run.codes) < start.ranks and time.monotonic() < until:
                if run.failed_at is not None and time.monotonic() > run.failed_at + _GRACE:
                    break
                self._listen(run)
        finally:
            for pid in run.ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # and what it has started
        return _outcome(start, run, time.monotonic() - began)

    def _ask(self, start: ScriptStart, proof: ScriptProof) -> None:
        """Ask for all ranks of a run."""
        port = free_port()
        variables = {**environment.snapshot(), **variables_of(proof.device)}
        for rank in range(start.ranks):
            self._servers[min(rank, 1)].ask(
                run=start.name,
                rank=rank,
                module=start.rank_command[0],
                arguments=start.rank_command[1:],
                variables={**variables, **_of_rank(rank, start.ranks, port)},
                output=str(start.place / LOGS / f"{rank}.log"),
            )

    def _listen(self, run: _Run) -> None:
        """Note what the servers say, in a tenth of a second."""
        with selectors.DefaultSelector() as selector:
            for server in self._servers:
                selector.register(server.answers, selectors.EVENT_READ, server)
            for key, _ in selector.select(0.1):
                for answer in key.data.read(0):
                    run.notice(answer)


def _outcome(start: ScriptStart, run: _Run, seconds: float) -> CommandOutcome:
    """How a run ended; of a failed one what the rank wrote that failed first."""
    failed = next((rank for rank, code in run.codes.items() if code), None)
    code = run.codes[failed] if failed is not None else 0 if len(run.codes) == start.ranks else None
    shown = [failed] if failed is not None else range(start.ranks)
    return CommandOutcome(code=code, seconds=seconds, output="".join(_text(start, rank) for rank in shown))


def _text(start: ScriptStart, rank: int) -> str:
    file = start.place / LOGS / f"{rank}.log"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "samestep",
    }


def free_port() -> int:
    """A free port of 127.0.0.1 below the ephemeral ports (net.ipv4.ip_local_port_range begins with 32768 by default).

    Rank 0 listens there a second later. Until then the system may give an ephemeral port to any program's connection.
    """
    for port in SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise UserError(f"all ports of 127.0.0.1 from {_PORTS[0]} to {_PORTS[-1]} are in use; end what listens there")


_PORTS = range(20_000, 32_768)
