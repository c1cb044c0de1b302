"""Controller: brings the agents of all hosts up, shows what they print, and ends them all."""

import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

from samestep.cluster.start.link import Ended, Event, Line, Link, Told
from samestep.cluster.start.outcome import Outcome, of_failures
from samestep.cluster.start.rank_files import write_lines
from samestep.cluster.start.remote import request
from samestep.cluster.start.starter import Bring

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGAIN = 0.5  # seconds; a signal to the process group and one to this process are the same one
_AFTER_END = 3.0  # seconds for the other hosts to find by themselves that the job is over
_KILLED = 5.0  # seconds from the order to kill to the end of what connects us
_BY_SIGNAL = 128  # the exit code of an agent that a signal ends is so much and the signal's number
_FIRST_WAIT, _LONGEST_WAIT = 3.0, 60.0  # seconds until a lost host is tried again; twice as many after each try


class Controller:
    """One job over hosts that this process brings up."""

    def __init__(
        self, brings: Sequence[Bring], folder: str, variables: Mapping[str, str], *, notice: float, elastic: bool
    ) -> None:
        """`folder` and `variables` are for every host."""
        self._brings = brings
        self._folder = folder
        self._variables = variables
        self._notice = notice
        self._elastic = elastic
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # a signal's handler may put into it
        self._links: set[Link] = set()
        self._again: dict[Bring, float] = {}  # hosts that were lost, and when they are tried again
        self._waits: dict[Bring, float] = {}  # how long, of those that have not come back
        self._outcomes: dict[str, Outcome] = {}
        self._lost: list[str] = []
        self._gave_up: dict[str, Outcome] = {}  # by host
        self._reasons: dict[Bring, str] = {}  # why hosts were lost last
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

    def _connect(self, bring: Bring) -> None:
        self._links.add(Link(bring, request(bring.parts, self._folder, self._variables), self._events))

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
            case Told(link=link, values=values):
                self._told(link, values)
            case Ended(link=link):
                self._links.discard(link)
                self._ended(link)
            case None:  # a signal
                self._pass_on()

    def _show(self, link: Link) -> None:
        """Lines of a host whose agent runs: its ranks' own, or such as ssh's warnings."""
        if link.started:
            for number, lines in link.let_go():
                write_lines((sys.stdout if number == 1 else sys.stderr).buffer, lines)

    def _told(self, link: Link, values: Mapping[str, Any]) -> None:
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

    def _gives_up(self, link: Link, host: str, outcome: Outcome) -> bool:
        """Whether the others go on without a host whose part has ended so."""
        if not self._elastic or self._ordered or self._ending or outcome.failure is not None:
            return False
        # A mistake ends the job, but for one that shows when a host comes back: its disk may not be mounted yet.
        own = outcome.exit_code == 1 or outcome.exit_code > _BY_SIGNAL or link.bring in self._waits
        others = {each for link in self._links for each in link.started} - {host}
        return outcome.exit_code != 0 and own and bool(others - self._outcomes.keys() - self._gave_up.keys())

    def _ended(self, link: Link) -> None:
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

    def _await(self, link: Link, reason: str, gave_up: Outcome | None) -> None:
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
        if not self._over:
            self._over = True
            now = time.monotonic() + after
            kill = now + self._notice + _KILLED
            self._orders = [(now, f"signal {int(signal.SIGTERM)}"), (kill, "kill"), (kill + _KILLED, "")]

    def _give_orders(self) -> None:
        while self._orders and self._orders[0][0] < time.monotonic():
            _, order = self._orders.pop(0)
            self._ordered = True
            for link in self._links:
                if order:
                    link.order(order)
                else:
                    link.kill()

    def _hear(self, number: int, frame: FrameType | None) -> None:
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
        kill = now + self._notice + _KILLED
        self._orders = [(now, f"signal {self._signal}"), (kill, "kill"), (kill + _KILLED, "")]

    def _cut(self) -> None:
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
