"""Controller: brings the agents of all hosts up, shows what they print, and ends them all.

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
from types import FrameType
from typing import IO, Any

from samestep import environment
from samestep.launch.failure import Outcome, of_failures
from samestep.launch.logs import write_lines
from samestep.launch.node_spec import AgentCommand
from samestep.launch.remote_agent import MARK, request

_NO_COMMAND = (126, 127)  # what a shell ends with that can't run or find a command
_NO_PYTHON = ("No module named 'samestep'", "execve()")  # what Python says, and srun
_LAST_LINES = 12  # of a process that ended before its agent ran
_LATE = 1.0  # seconds for what was printed to arrive when its process has ended


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line that a process on the remote host printed."""

    link: "AgentConnection"
    number: int  # of the stream: 1 or 2
    text: bytes


@dataclass(frozen=True, kw_only=True)
class AgentMessage:
    """A message of a remote agent."""

    link: "AgentConnection"
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AgentEnded:
    """The process has ended, and all that it printed has been read."""

    link: "AgentConnection"


Event = Line | AgentMessage | AgentEnded | None


class AgentConnection:
    """A process that was started to reach hosts."""

    def __init__(self, bring: AgentCommand, request: bytes, events: "SimpleQueue[Event]") -> None:
        """Start it, and put all that comes from it into `events`."""
        self.bring = bring
        self.began = time.monotonic()
        self.started: set[str] = set()  # hosts whose agents run
        self._events = events
        self._held: list[tuple[int, bytes]] = []
        self._failure: str | None = None
        try:
            # A session of its own: Ctrl-C at the terminal is ours to pass on.
            self._process = subprocess.Popen(
                bring.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={name: value for name, value in environment.snapshot().items() if name not in bring.without},
            )
        except OSError as error:
            self._process, self._failure = None, f"{bring.command[0]}: {error.strerror}"
            events.put(AgentEnded(link=self))
            return
        self._readers = [
            threading.Thread(target=self._read, args=(number, stream), daemon=True)
            for number, stream in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._send, args=(request,), daemon=True)):
            thread.start()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _read(self, number: int, stream: IO[bytes]) -> None:
        """A thread: lines of one stream; those with the mark are the agent's messages as JSON."""
        with stream:
            for line in stream:
                text = line.rstrip(b"\n")
                if number == 1 and text.startswith(MARK):
                    self._events.put(AgentMessage(link=self, values=json.loads(text.removeprefix(MARK))))
                else:
                    self._events.put(Line(link=self, number=number, text=text))

    def _send(self, data: bytes) -> None:
        """Write an order to the agent; one that has ended takes none."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, which is seen elsewhere
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _await_end(self) -> None:
        """A thread: says that the process has ended, once all that it printed has been read."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.wait()
        for reader in self._readers:  # ssh may leave a process behind that holds them: its shared connection
            reader.join(_LATE)
        self._events.put(AgentEnded(link=self))
        with suppress(OSError):  # what it was sent and has not read
            self._process.stdin.close()

    def hold(self, number: int, text: bytes) -> None:
        """Keep a line until it is known what it is: an agent's, or why there is none."""
        self._held.append((number, text))

    def let_go(self) -> list[tuple[int, Sequence[bytes]]]:
        """The lines that were kept."""
        held, self._held = self._held, []
        return [(number, [text]) for number, text in held]

    def order(self, text: str) -> None:
        """Send the remote agent a message."""
        if self._process is not None:
            self._send(text.encode() + b"\n")

    def kill(self) -> None:
        """End the process; the remote agent sees that its connection is gone."""
        if self._process is not None:
            self._process.kill()

    def why(self, hosts: Sequence[str]) -> str:
        """Why the process ended, where its hosts' agents have not said how theirs did."""
        lost = [host for host in hosts if host in self.started]
        words = [text.decode(errors="replace").strip() for _, text in self._held]
        lines = "\n".join([word for word in words if word][-_LAST_LINES:])
        name = self.bring.command[0].rpartition("/")[2]
        if self._process is None:
            return f"{', '.join(hosts)} can't be reached: {self._failure}"
        end = f"{name} ended with exit code {self._process.returncode}"
        if lost:
            return f"{', '.join(lost)} was lost in the middle of the job: {end}{': ' if lines else ''}{lines}"
        said = f"{', '.join(hosts)} can't be reached: {lines or 'no message'} ({end})"
        if self._process.returncode in _NO_COMMAND or any(words in lines for words in _NO_PYTHON):
            return f"{said}; samestep is to be installed there too, and --remote-python names the Python that has it"
        return said


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN = 0.5  # seconds; a signal to the process group and one to this process are the same one
_AFTER_END = 3.0  # seconds for the other hosts to find by themselves that the job is over
_KILLED = 5.0  # seconds from the order to kill to the end of what connects us
_BY_SIGNAL = 128  # the exit code of an agent that a signal ends is so much and the signal's number
_FIRST_WAIT, _LONGEST_WAIT = 3.0, 60.0  # seconds until a lost host is tried again; twice as many after each try


class Controller:
    """One job over hosts that this process brings up.

    Events come through one queue, from a thread for each stream of each connection: lines, messages, ends. Everything
    else happens in the one thread that reads the queue, so no state here needs a lock.

    How a job ends: after an agent's outcome other than 0 the controller waits 3 s (the other agents see the end
    through the store), after a connection that ends without an outcome not at all. Then it sends SIGTERM, after the
    grace period and 5 s more it has the ranks killed, and 5 s later it cuts the connections.
    """

    def __init__(
        self,
        brings: Sequence[AgentCommand],
        folder: str,
        variables: Mapping[str, str],
        *,
        grace_period: float,
        elastic: bool,
    ) -> None:
        """`folder` and `variables` are for every host."""
        self._brings = brings
        self._folder = folder
        self._variables = variables
        self._grace_period = grace_period
        self._elastic = elastic
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # a signal's handler may put into it
        self._links: set[AgentConnection] = set()
        self._again: dict[AgentCommand, float] = {}  # hosts that were lost, and when they are tried again
        self._waits: dict[AgentCommand, float] = {}  # how long, of those that have not come back
        self._outcomes: dict[str, Outcome] = {}
        self._lost: list[str] = []
        self._gave_up: dict[str, Outcome] = {}  # by host
        self._reasons: dict[AgentCommand, str] = {}  # why hosts were lost last
        self._signal = 0
        self._signal_at = 0.0
        self._told_of_signal = False
        # When the agents are told to end, to kill their ranks, and when what connects us is killed.
        self._orders: list[tuple[float, str]] = []
        self._over = False  # whether something has gone wrong that ends the job
        self._ordered = False  # whether an order was given: who ends then has not been lost

    def run(self) -> Outcome:
        """Until every host's part has ended. No process is left, here or there."""
        with ExitStack() as stack:
            for number in _SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._hear))
            stack.callback(self._cut)
            for bring in self._brings:
                self._connect(bring)
            while self._links or (self._again and not self._ending):
                self._take()
                self._give_orders()
                self._try_again()
        return self._outcome()

    @property
    def _ending(self) -> bool:
        return self._over or bool(self._signal)

    def _connect(self, bring: AgentCommand) -> None:
        self._links.add(AgentConnection(bring, request(bring.parts, self._folder, self._variables), self._events))

    def _take(self) -> None:
        """What happened, if something did."""
        try:
            event = self._events.get(timeout=0.2)
        except queue.Empty:
            return
        match event:
            case Line(link=link, number=number, text=text):
                link.hold(number, text)
                self._show(link)
            case AgentMessage(link=link, values=values):
                self._told(link, values)
            case AgentEnded(link=link):
                self._links.discard(link)
                self._ended(link)
            case None:  # a signal
                self._pass_on()

    def _show(self, link: AgentConnection) -> None:
        """Lines of a host whose agent runs: its ranks' own, or such as ssh's warnings."""
        if link.started:
            for number, lines in link.let_go():
                write_lines((sys.stdout if number == 1 else sys.stderr).buffer, lines)

    def _told(self, link: AgentConnection, values: Mapping[str, Any]) -> None:
        """An agent's message: it has started, or its host's part is over."""
        host = values["host"]
        if "started" in values:
            link.started.add(host)
            self._show(link)
        elif "outcome" in values:
            outcome = Outcome.from_json(values["outcome"])
            if self._gives_up(link, host, outcome):
                self._gave_up[host] = outcome
                return
            self._outcomes[host] = outcome
            if outcome.exit_code != 0:
                self._end_all(_AFTER_END)

    def _gives_up(self, link: AgentConnection, host: str, outcome: Outcome) -> bool:
        """Whether the others go on without a host whose part has ended so."""
        if not self._elastic or self._ordered or self._ending or outcome.failure is not None:
            return False
        # A mistake ends the job, but for one that shows when a host comes back: its disk may not be mounted yet.
        own = outcome.exit_code == 1 or outcome.exit_code > _BY_SIGNAL or link.bring in self._waits
        others = {each for link in self._links for each in link.started} - {host}
        return outcome.exit_code != 0 and own and bool(others - self._outcomes.keys() - self._gave_up.keys())

    def _ended(self, link: AgentConnection) -> None:
        """A connection ended.

        Where hosts behind it have told no outcome, they are lost: for an elastic job one that may come back, else the
        end of the job.
        """
        missing = [part.host for part in link.bring.parts if part.host not in self._outcomes]
        if not missing or self._signal or self._ordered:
            return
        done = [self._outcomes[part.host].exit_code == 0 for part in link.bring.parts if part.host in self._outcomes]
        if self._elastic and any(done):
            return  # others behind the same process have done the job without them
        lost = [host for host in missing if host not in self._gave_up]
        gave_up = None if lost else self._gave_up[missing[0]]
        reason = link.why(lost) if gave_up is None else _reason(missing[0], gave_up)
        if gave_up is not None and self._over:
            self._outcomes[missing[0]] = gave_up
            return
        for host in missing:
            self._gave_up.pop(host, None)
        if self._elastic and self._links and not self._over:
            self._await(link, reason, gave_up)
            return
        self._lost.append(reason)
        self._end_all(0)

    def _await(self, link: AgentConnection, reason: str, gave_up: Outcome | None) -> None:
        """Try a lost host again later, and say so once for each time that it is lost."""
        # A host that soon gives up for the same reason as before has not come back in between.
        soon = time.monotonic() - link.began < _LONGEST_WAIT
        same = gave_up is not None and soon and self._reasons.get(link.bring) == reason
        before = None if link.started and not same else self._waits.get(link.bring)
        self._reasons[link.bring] = reason
        if before is None:
            print(f"samestep: {reason}; the others go on, and it is tried again", file=sys.stderr, flush=True)
        # Where somebody has stopped it, its machine may be about to go down.
        first = _LONGEST_WAIT if gave_up is not None and gave_up.exit_code > _BY_SIGNAL else _FIRST_WAIT
        wait = first if before is None else min(2 * before, _LONGEST_WAIT)
        self._waits[link.bring] = wait
        self._again[link.bring] = time.monotonic() + wait

    def _try_again(self) -> None:
        """Bring lost hosts up again, as long as others work."""
        if self._ending or not self._links:
            self._again.clear()
        for bring, at in list(self._again.items()):
            if time.monotonic() > at:
                del self._again[bring]
                self._connect(bring)

    def _end_all(self, after: float) -> None:
        """Plan the job's end: SIGTERM after `after` seconds, then kill, then cut."""
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
            for link in self._links:
                if order:
                    link.order(order)
                else:
                    link.kill()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: notes the signal, and wakes the thread that reads the queue."""
        now = time.monotonic()
        if not self._signal or now - self._signal_at > _AGAIN:
            self._signal, self._signal_at = self._signal or number, now
            self._events.put(None)

    def _pass_on(self) -> None:
        """A signal: the first one goes to all hosts' ranks, a second one kills them."""
        now = time.monotonic()
        if self._told_of_signal:
            self._orders = [(now, "kill"), (now + _KILLED, "")]
            return
        self._told_of_signal = True
        name = signal.Signals(self._signal).name
        print(f"samestep: {name}: all hosts' ranks are told; a second one ends them at once", file=sys.stderr)
        kill = now + self._grace_period + _KILLED
        self._orders = [(now, f"signal {self._signal}"), (kill, "kill"), (kill + _KILLED, "")]

    def _cut(self) -> None:
        """End the processes that connect us, whatever they still print."""
        for link in self._links:
            link.kill()

    def _outcome(self) -> Outcome:
        """How the job ended, over all hosts."""
        if self._signal:
            return Outcome(exit_code=128 + self._signal, message=f"stopped by signal {self._signal}")
        outcomes = self._outcomes.values()
        found = of_failures(each.failure for each in outcomes if each.failure is not None)
        if found is not None and not (self._lost and found.failure is not None and found.failure.follows):
            return found
        mistakes = [each for each in outcomes if each.exit_code == 2]
        if mistakes:
            return Outcome(exit_code=2, message="\n".join(_messages(mistakes)))
        if self._lost:
            return Outcome(exit_code=1, message="\n".join(self._lost))
        bad = [each for each in outcomes if each.exit_code != 0]
        if bad:
            return Outcome(exit_code=bad[0].exit_code, message="\n".join(_messages(bad)))
        return Outcome()


def _reason(host: str, outcome: Outcome) -> str:
    """Why a host has given up."""
    message = outcome.message or "it gave no reason"
    return message if message.startswith(host) else f"{host}: {message}"


def _messages(outcomes: Sequence[Outcome]) -> list[str]:
    """What hosts say, each thing once."""
    return list(dict.fromkeys(outcome.message for outcome in outcomes if outcome.message is not None))
