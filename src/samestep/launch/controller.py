"""Controller: starts the agents of all hosts, shows their output, and ends them.

An AgentConnection reads the messages and output lines of the remote agents behind one launcher process (ssh, srun or
ray).
"""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

from samestep import environment
from samestep.errors import USERS_MISTAKE
from samestep.fault_tolerance.signals import ENDING, TwoSignals
from samestep.launch.failure import JobOutcome, of_failures
from samestep.launch.job_secret import JobSecret
from samestep.launch.logs import write_lines
from samestep.launch.remote_agent import MARK, request
from samestep.launch.starter import AgentCommand
from samestep.progress import phases

_NO_COMMAND = (126, 127)  # exit codes of a shell that can't run or find a command
_NO_PYTHON = ("No module named 'samestep'", "execve()")  # messages of Python and of srun
_LAST_LINES = 12  # shown of a process that ended before its agent ran
_LATE = 1.0  # seconds to wait for the remaining output of an ended process


@dataclass(frozen=True, kw_only=True)
class Line:
    """An output line of a remote process."""

    connection: "AgentConnection"
    number: int  # 1: stdout, 2: stderr
    text: bytes


@dataclass(frozen=True, kw_only=True)
class AgentMessage:
    """A message of a remote agent."""

    connection: "AgentConnection"
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AgentEnded:
    """A launcher process has ended, and all its output has been read."""

    connection: "AgentConnection"


Event = Line | AgentMessage | AgentEnded | None


class AgentConnection:
    """A local launcher process (ssh, srun or ray), and the connection to the remote agents behind it."""

    def __init__(self, agents: AgentCommand, request: bytes, events: "SimpleQueue[Event]") -> None:
        """Start the process; its lines, messages and end are put into `events`."""
        self.agents = agents
        self.began = time.monotonic()
        self.started: set[str] = set()  # hosts whose agents run
        self._events = events
        self._held: list[tuple[int, bytes]] = []
        self._failure: str | None = None
        try:
            # A session of its own: Ctrl-C at the terminal is ours to pass on.
            self._process = subprocess.Popen(
                agents.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={name: value for name, value in environment.snapshot().items() if name not in agents.without},
            )
        except OSError as error:
            self._process, self._failure = None, f"{agents.command[0]}: {error.strerror}"
            events.put(AgentEnded(connection=self))
            return
        self._readers = [
            threading.Thread(target=self._read, args=(number, stream), daemon=True)
            for number, stream in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._send, args=(request,), daemon=True)):
            thread.start()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _read(self, number: int, stream: IO[bytes]) -> None:
        """Thread: reads one stream's lines; marked lines are the agent's messages as JSON."""
        with stream:
            for line in stream:
                text = line.rstrip(b"\n")
                if number == 1 and text.startswith(MARK):
                    self._events.put(AgentMessage(connection=self, values=json.loads(text.removeprefix(MARK))))
                else:
                    self._events.put(Line(connection=self, number=number, text=text))

    def _send(self, data: bytes) -> None:
        """Write an order to the agent, unless it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # its end is handled elsewhere
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _await_end(self) -> None:
        """Thread: reports the end of the process after all its output has been read."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.wait()
        for reader in self._readers:  # ssh may leave its shared connection behind, which holds the pipes open
            reader.join(_LATE)
        self._events.put(AgentEnded(connection=self))
        with suppress(OSError):  # what it was sent and has not read
            self._process.stdin.close()

    def hold(self, number: int, text: bytes) -> None:
        """Buffer a line until an agent has started, or it is clear why none has."""
        self._held.append((number, text))

    def let_go(self) -> list[tuple[int, Sequence[bytes]]]:
        """Return the buffered lines, and clear the buffer."""
        held, self._held = self._held, []
        return [(number, [text]) for number, text in held]

    def order(self, text: str) -> None:
        """Send the remote agents an order."""
        if self._process is not None:
            self._send(text.encode() + b"\n")

    def kill(self) -> None:
        """Kill the process; the remote agents see their connection closed."""
        if self._process is not None:
            self._process.kill()

    def why(self, hosts: Sequence[str]) -> str:
        """Describe why the process ended without outcomes of its hosts' agents."""
        lost = [host for host in hosts if host in self.started]
        words = [text.decode(errors="replace").strip() for _, text in self._held]
        lines = "\n".join([word for word in words if word][-_LAST_LINES:])
        name = self.agents.command[0].rpartition("/")[2]
        if self._process is None:
            return f"{', '.join(hosts)} can't be reached: {self._failure}"
        end = f"{name} ended with exit code {self._process.returncode}"
        if lost:
            return f"{', '.join(lost)} was lost in the middle of the job: {end}{': ' if lines else ''}{lines}"
        message = f"{', '.join(hosts)} can't be reached: {lines or 'no message'} ({end})"
        if self._process.returncode in _NO_COMMAND or any(words in lines for words in _NO_PYTHON):
            return (
                f"{message}; samestep is to be installed there too, and --remote-python names the Python that has it"
            )
        return message


_AFTER_END = 3.0  # seconds for the other hosts to notice the job's end by themselves
_KILLED = 5.0  # seconds from the order to kill to cutting the connections
_BY_SIGNAL = 128  # exit code of an agent ended by a signal: this plus the signal's number
_FIRST_WAIT, _LONGEST_WAIT = 3.0, 60.0  # seconds before a lost host is retried; doubles after each try


class Controller:
    """One job over hosts whose agents this process starts.

    Events come through one queue, from a thread for each stream of each connection: lines, messages, ends. Everything
    else happens in the one thread that reads the queue, so no state here needs a lock.

    How a job ends: after an agent's outcome other than 0 the controller waits 3 s (the other agents see the end
    through the store), after a connection that ends without an outcome not at all. Then it sends SIGTERM, after the
    grace period and 5 s more it has the ranks killed, and 5 s later it cuts the connections.
    """

    def __init__(
        self,
        agents: Sequence[AgentCommand],
        folder: str,
        variables: Mapping[str, str],
        *,
        grace_period: float,
        elastic: bool,
        secret: JobSecret | None = None,
    ) -> None:
        """`folder`, `variables` and the job's secret go to every host."""
        self._secret = secret
        self._agents = agents
        self._folder = folder
        self._variables = variables
        self._grace_period = grace_period
        self._elastic = elastic
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # reentrant: signal handlers put into it
        self._connections: set[AgentConnection] = set()
        self._again: dict[AgentCommand, float] = {}  # lost hosts, and when each is retried
        self._waits: dict[AgentCommand, float] = {}  # current delay of hosts that have not come back
        self._outcomes: dict[str, JobOutcome] = {}
        self._lost: list[str] = []
        self._gave_up: dict[str, JobOutcome] = {}  # host -> its outcome
        self._reasons: dict[AgentCommand, str] = {}  # why hosts were last lost
        self._signals = TwoSignals(ENDING, first=self._hear, second=self._hear)
        self._signal_printed = False
        # Times for: SIGTERM to the agents, killing their ranks, cutting the connections.
        self._orders: list[tuple[float, str]] = []
        self._over = False  # whether a failure ends the job
        self._ordered = False  # whether an order was sent: an agent that ends afterwards is not lost

    def run(self) -> JobOutcome:
        """Run the job until every host's part has ended. No process is left, local or remote."""
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            stack.callback(self._cut)
            hosts = sum(len(agents.specs) for agents in self._agents)
            stack.enter_context(phases.phase(f"starting on {hosts} hosts", others=True))
            stack.enter_context(phases.status(lambda: f"running on {hosts} hosts", others=True))
            for agents in self._agents:
                self._connect(agents)
            while self._connections or (self._again and not self._ending):
                self._take()
                self._give_orders()
                self._try_again()
        return self._outcome()

    @property
    def _ending(self) -> bool:
        return self._over or bool(self._signal)

    def _connect(self, agents: AgentCommand) -> None:
        self._connections.add(
            AgentConnection(agents, request(agents.specs, self._folder, self._variables, self._secret), self._events)
        )

    def _take(self) -> None:
        """Handle the next event, if any."""
        try:
            event = self._events.get(timeout=0.2)
        except queue.Empty:
            return
        match event:
            case Line(connection=connection, number=number, text=text):
                connection.hold(number, text)
                self._show(connection)
            case AgentMessage(connection=connection, values=values):
                self._take_message(connection, values)
            case AgentEnded(connection=connection):
                self._connections.discard(connection)
                self._ended(connection)
            case None:  # a signal
                self._pass_on()

    def _show(self, connection: AgentConnection) -> None:
        """Print the lines of hosts whose agents run: from their ranks, or from ssh."""
        if connection.started:
            for number, lines in connection.let_go():
                write_lines((sys.stdout if number == 1 else sys.stderr).buffer, lines)

    def _take_message(self, connection: AgentConnection, values: Mapping[str, Any]) -> None:
        """Handle an agent's message: started, or the outcome of its host."""
        host = values["host"]
        if "started" in values:
            connection.started.add(host)
            self._show(connection)
        elif "outcome" in values:
            outcome = JobOutcome.from_json(values["outcome"])
            if self._gives_up(connection, host, outcome):
                self._gave_up[host] = outcome
                return
            self._outcomes[host] = outcome
            if outcome.exit_code != 0:
                self._end_all(_AFTER_END)

    def _gives_up(self, connection: AgentConnection, host: str, outcome: JobOutcome) -> bool:
        """Whether the other hosts go on without a host with this outcome."""
        if not self._elastic or self._ordered or self._ending or outcome.failure is not None:
            return False
        # A user mistake ends the job, except on a host that comes back: its disk may not be mounted yet.
        own = outcome.exit_code == 1 or outcome.exit_code > _BY_SIGNAL or connection.agents in self._waits
        others = {host_ for connection in self._connections for host_ in connection.started} - {host}
        return outcome.exit_code != 0 and own and bool(others - self._outcomes.keys() - self._gave_up.keys())

    def _ended(self, connection: AgentConnection) -> None:
        """Handle the end of a connection.

        Its hosts without an outcome are lost: an elastic job may get them back, any other job ends.
        """
        missing = [spec.host for spec in connection.agents.specs if spec.host not in self._outcomes]
        if not missing or self._signal or self._ordered:
            return
        done = [
            self._outcomes[spec.host].exit_code == 0
            for spec in connection.agents.specs
            if spec.host in self._outcomes
        ]
        if self._elastic and any(done):
            return  # other hosts behind the same process have finished the job without them
        lost = [host for host in missing if host not in self._gave_up]
        gave_up = None if lost else self._gave_up[missing[0]]
        reason = connection.why(lost) if gave_up is None else _reason(missing[0], gave_up)
        if gave_up is not None and self._over:
            self._outcomes[missing[0]] = gave_up
            return
        for host in missing:
            self._gave_up.pop(host, None)
        if self._elastic and self._connections and not self._over:
            self._await(connection, reason, gave_up)
            return
        self._lost.append(reason)
        self._end_all(0)

    def _await(self, connection: AgentConnection, reason: str, gave_up: JobOutcome | None) -> None:
        """Schedule a retry of a lost host; printed once each time that it is lost."""
        # A host that soon fails for the same reason as before has not come back in between.
        soon = time.monotonic() - connection.began < _LONGEST_WAIT
        same = gave_up is not None and soon and self._reasons.get(connection.agents) == reason
        before = None if connection.started and not same else self._waits.get(connection.agents)
        self._reasons[connection.agents] = reason
        if before is None:
            print(f"samestep: {reason}; the others go on, and it is tried again", file=sys.stderr, flush=True)
        # After a signal on that host, its machine may be about to go down.
        first = _LONGEST_WAIT if gave_up is not None and gave_up.exit_code > _BY_SIGNAL else _FIRST_WAIT
        wait = first if before is None else min(2 * before, _LONGEST_WAIT)
        self._waits[connection.agents] = wait
        self._again[connection.agents] = time.monotonic() + wait

    def _try_again(self) -> None:
        """Start the agents of lost hosts again, as long as other hosts run."""
        if self._ending or not self._connections:
            self._again.clear()
        for agents, at in list(self._again.items()):
            if time.monotonic() > at:
                del self._again[agents]
                self._connect(agents)

    def _end_all(self, after: float) -> None:
        """Schedule the job's end: SIGTERM after `after` seconds, then kill, then cut."""
        if not self._over:
            self._over = True
            now = time.monotonic() + after
            kill = now + self._grace_period + _KILLED
            self._orders = [(now, f"signal {int(signal.SIGTERM)}"), (kill, "kill"), (kill + _KILLED, "")]

    def _give_orders(self) -> None:
        """Send the orders that are due."""
        while self._orders and self._orders[0][0] < time.monotonic():
            _, order = self._orders.pop(0)
            self._ordered = True
            for connection in self._connections:
                if order:
                    connection.order(order)
                else:
                    connection.kill()

    @property
    def _signal(self) -> int:
        """The first signal's number, 0 if there was none."""
        return self._signals.number or 0

    def _hear(self, _: int) -> None:
        """Wake the thread that reads the queue."""
        self._events.put(None)

    def _pass_on(self) -> None:
        """Forward a signal: the first one to all hosts' ranks; a second one kills them."""
        now = time.monotonic()
        if self._signal_printed:
            self._orders = [(now, "kill"), (now + _KILLED, "")]
            return
        self._signal_printed = True
        name = signal.Signals(self._signal).name
        print(
            f"samestep: {name}: the ranks of all hosts are asked to stop; a second one ends them at once",
            file=sys.stderr,
        )
        kill = now + self._grace_period + _KILLED
        self._orders = [(now, f"signal {self._signal}"), (kill, "kill"), (kill + _KILLED, "")]

    def _cut(self) -> None:
        """Kill the launcher processes, whatever they still print."""
        for connection in self._connections:
            connection.kill()

    def _outcome(self) -> JobOutcome:
        """Combine the hosts' outcomes."""
        if self._signal:
            return JobOutcome(exit_code=128 + self._signal, message=f"stopped by signal {self._signal}")
        outcomes = self._outcomes.values()
        failure = of_failures(outcome.failure for outcome in outcomes if outcome.failure is not None)
        if failure is not None and not (self._lost and failure.failure is not None and failure.failure.follows):
            return failure
        mistakes = [outcome for outcome in outcomes if outcome.exit_code == USERS_MISTAKE]
        if mistakes:
            return JobOutcome(exit_code=2, message="\n".join(_messages(mistakes)))
        if self._lost:
            return JobOutcome(exit_code=1, message="\n".join(self._lost))
        bad = [outcome for outcome in outcomes if outcome.exit_code != 0]
        if bad:
            return JobOutcome(exit_code=bad[0].exit_code, message="\n".join(_messages(bad)))
        return JobOutcome()


def _reason(host: str, outcome: JobOutcome) -> str:
    """Describe why a host has given up."""
    message = outcome.message or "it gave no reason"
    return message if message.startswith(host) else f"{host}: {message}"


def _messages(outcomes: Sequence[JobOutcome]) -> list[str]:
    """Return the hosts' messages without duplicates."""
    return list(dict.fromkeys(outcome.message for outcome in outcomes if outcome.message is not None))
