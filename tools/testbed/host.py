"""Host: runs commands, crashes, boots again, has its cable pulled."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from testbed.network import Switch, limit_rate
from testbed.possible import NAMESPACES

_INIT = Path(__file__).with_name("init.py")


class FailedError(RuntimeError):
    """A command on a host ended with another exit code than 0."""


class Running:
    """A command that was started on a host. Its output goes into a file, so that it never waits for a reader."""

    def __init__(self, process: "subprocess.Popen[bytes]", host: str, command: Sequence[str], output: Path) -> None:
        self._process = process
        self._host = host
        self._command = command
        self.output = output

    @property
    def pid(self) -> int:
        """Of a process outside the host, which ends as the command does, and whose process group the command has."""
        return self._process.pid

    @property
    def text(self) -> str:
        """What it has printed, errors included."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal. It is stopped where it takes longer than `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            raise TimeoutError(f"{self} ran for more than {timeout:g} s and printed:\n{_last(self.text)}") from None

    def finish(self, timeout: float) -> str:
        """Wait for its end and return what it printed. Raises FailedError where its exit code isn't 0."""
        code = self.wait(timeout)
        if code != 0:
            raise FailedError(f"{self} ended with exit code {code} and printed:\n{_last(self.text)}")
        return self.text

    def send(self, number: int) -> None:
        """Send a signal to it and to what it started, as a terminal does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def stop(self, patience: float = 5.0) -> None:
        """End it: by SIGTERM, and by SIGKILL after some seconds."""
        self.send(signal.SIGTERM)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._process.wait(patience)

    def __str__(self) -> str:
        return f"{self._host}: {shlex.join(self._command)}"


def _last(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:])


class Host:
    """A host of a testbed: a process tree, a name, a network, /dev/shm and /run of its own; all files are shared."""

    def __init__(
        self,
        name: str,
        address: str,
        switch: Switch,
        *,
        folder: Path,
        binds: Mapping[Path, str],
        booted: Callable[["Host"], None],
    ) -> None:
        """`binds` are files and folders to be seen at other places on this host; `booted` starts its services."""
        self.name = name
        self.address = address
        self._switch = switch
        self._folder = folder
        self._binds = {str(source): target for source, target in binds.items()}
        self._booted = booted
        self._first: subprocess.Popen[str] | None = None
        self._pid = 0
        self._boots = 0
        self._commands = 0
        self._entered: list[subprocess.Popen[bytes]] = []
        self._rate: str | None = None
        folder.mkdir()
        (folder / "hostname").write_text(f"{name}\n")
        self._binds[str(folder / "hostname")] = "/etc/hostname"

    @property
    def is_up(self) -> bool:
        return self._first is not None

    @property
    def pid(self) -> int:
        """The process number, outside the host, of its first process."""
        if self._first is None:
            raise RuntimeError(f"{self.name} is down; call boot()")
        return self._pid

    def boot(self) -> None:
        """Start the host, with the address that it always has."""
        if self._first is not None:
            raise RuntimeError(f"{self.name} is up already")
        if self._boots:
            # The kernel sends the dead host's last packets for as long as others owe it an answer, and with the
            # hardware address that both have, they would draw the new one's packets away.
            self._switch.disconnect(self._port)
        settings = {"name": self.name, "folder": str(self._folder), "binds": self._binds}
        command = ["unshare", *NAMESPACES, sys.executable, "-I", "-S", str(_INIT), json.dumps(settings)]
        log = self._folder / "init.log"
        with log.open("wb") as errors:
            first = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd="/"
            )
        assert first.stdout is not None
        if first.stdout.readline().strip() != "ready":
            first.kill()
            first.communicate()
            raise RuntimeError(f"{self.name} does not boot: {log.read_text()}")
        self._first = first
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()
        self._pid = int(children)
        self._boots += 1
        self._switch.connect_host(self._pid, self._port, self.address)
        if self._rate is not None:
            self.limit(self._rate)
        self._booted(self)

    @property
    def _port(self) -> str:
        # Another one each time: the kernel takes the old one away some time after the host has gone.
        return f"{self.name}-{self._boots}"

    def crash(self) -> None:
        """End every process at once; the kernel still closes their connections, as when a container is killed."""
        if self._first is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        self._first.communicate(timeout=20)
        self._first = None
        for process in self._entered:
            process.wait(20)
        self._entered.clear()

    def power_off(self) -> None:
        """Take the power away: nothing is heard of the host any more, not even that its connections have ended."""
        self.unplug()
        self.crash()

    def unplug(self) -> None:
        """Pull the network cable."""
        self._switch.set_port(self._port, "down")

    def plug(self) -> None:
        """Put the network cable back."""
        self._switch.set_port(self._port, "up")

    def limit(self, rate: str | None) -> None:
        """Let its cable carry no more than `rate` each way, such as "100mbit"; None: as fast as it can."""
        self._rate = rate
        limit_rate(self.pid, "eth0", rate)
        limit_rate(self._switch.pid, self._port, rate)

    def own_folder(self, folder: Path) -> None:
        """Give the host an empty folder of its own in the place of a shared one, until it is down."""
        self.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)])

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: Path | None = None,
    ) -> Running:
        """Start a command on the host. `env` is added to this process's variables, `cwd` stands for its folder."""
        self._commands += 1
        output = output or self._folder / f"command-{self._commands}.log"
        with output.open("wb") as file:
            process = self._enter(command, env, cwd, file, file)
        return Running(process, self.name, command, output)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host to its end.

        Raises TimeoutError where it takes longer than `timeout` seconds, and ends it then; FailedError where its exit
        code isn't 0, unless `check` is False.
        """
        self._commands += 1
        output, errors = (self._folder / f"command-{self._commands}.{end}" for end in ("log", "errors"))
        with output.open("wb") as file, errors.open("wb") as other:
            process = self._enter(command, env, cwd, file, other)
        running = Running(process, self.name, command, output)
        try:
            code = running.wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{_last(errors.read_text(errors='replace'))}") from None
        done = subprocess.CompletedProcess(command, code, running.text, errors.read_text(errors="replace"))
        if check and code != 0:
            printed = _last(f"{done.stdout}\n{done.stderr}")
            raise FailedError(f"{running} ended with exit code {code} and printed:\n{printed}")
        return done

    def _enter(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> "subprocess.Popen[bytes]":
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        inside = ["nsenter", "--target", str(self.pid), *spaces, "env", f"--chdir={cwd or Path.cwd()}", *command]
        process = subprocess.Popen(
            inside,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        self._entered = [*(each for each in self._entered if each.poll() is None), process]
        return process

    def wait_for(self, port: int, timeout: float = 20.0) -> None:
        """Wait until something on the host listens on a port."""
        until = time.monotonic() + timeout
        wanted = f":{port:04X} "
        while True:
            tables = [Path(f"/proc/{self.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
            lines = [line.split(maxsplit=4) for table in tables for line in table.splitlines()[1:]]
            if any(f"{local} ".endswith(wanted) and state == "0A" for _, local, _, state, *_ in lines):
                return
            if time.monotonic() > until:
                raise TimeoutError(f"nothing on {self.name} listens on port {port} after {timeout:.0f} s")
            time.sleep(0.05)
