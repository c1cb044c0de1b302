"""Agents of a job on one machine, each as if it were a host: started, stopped, paused and killed one by one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest
from launching import free_port
from small_jobs import slow_job, wait_until

MARK = "SAMESTEP_TEST_AGENT"


def elastic_job(folder: Path, *, steps: int, seconds: float = 0.0, **run: Any) -> Path:
    """A small training with a checkpoint after every second step."""
    values = {
        "layout": "dp2",
        "elastic": True,
        "folder": str(folder / "run"),
        "checkpoint": {"every": 2, "asynchronous": False, "resume": "auto"},
    }
    return slow_job(folder, steps=steps, seconds=seconds, run={**values, **run})


class Agent:
    """One host's agent with its ranks."""

    def __init__(
        self, folder: Path, node: int, nodes: str, port: int, command: Sequence[str], options: Sequence[str]
    ):
        number = len(list(folder.glob(f"agent-{node}-*")))
        self.log = folder / f"agent-{node}-{number}.log"
        self._mark = f"{folder}-{node}-{number}"
        where = ["--no-ssh", "--node-rank", str(node), "--nodes", nodes, "--num-procs", "1", "--bind", "none"]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--job-id", "elastic"]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "samestep", "launch", *where, *meeting, *options, "--", *command],
                stdout=file,
                stderr=file,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
                cwd=folder,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def all(self) -> list[psutil.Process]:
        """The agent, and every process that it or a server of its has started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def send(self, number: signal.Signals, *, to_all: bool = False) -> None:
        for process in self.all() if to_all else [psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """As a host's death does: all of its processes end at once."""
        self.send(signal.SIGKILL, to_all=True)
        self.process.wait(20)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the agent runs for more than {seconds:.0f} s:\n{self.text}")


class Agents:
    """The agents of a job; none is left running."""

    def __init__(self, folder: Path, command: Sequence[str], nodes: str = "1:2", options: Sequence[str] = ()) -> None:
        self.folder = folder
        self._command, self._nodes, self._options = command, nodes, options
        self.port = free_port()
        self._all: list[Agent] = []

    def start(self, node: int, *options: str) -> Agent:
        agent = Agent(self.folder, node, self._nodes, self.port, self._command, [*self._options, *options])
        self._all.append(agent)
        return agent

    def wait_for(self, what: Callable[[], Any], limit: float = 60.0) -> float:
        """Seconds until something is so."""
        return wait_until(
            what, limit, told=lambda: "\n".join(f"--- {agent.log.name}\n{agent.text}" for agent in self._all)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._all:
            agent.kill()
