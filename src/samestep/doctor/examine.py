"""All checks of a machine, in the order in which they are shown: one line a check."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from samestep.doctor import collectives, machine, network
from samestep.doctor.findings import Check, DoctorFinding, ExaminationRequest, problem, warning
from samestep.progress import phases
from samestep.subprocess_group import signals_raise

CHECKS: Mapping[str, Check] = {
    "PyTorch": machine.torch_build,
    "packages": machine.packages,
    "engines": machine.engines,
    "cores": machine.cores,
    "threads": machine.threads,
    "NUMA": machine.numa,
    "memory": machine.memory,
    "swap": machine.swap,
    "shared memory": machine.shared_memory,
    "open files": machine.open_files,
    "locked memory": machine.locked_memory,
    "disks": machine.disks,
    "clock": machine.clock,
    "loopback": network.loopback,
    "port": network.port,
    "own name": network.own_name,
}


def examine(request: ExaminationRequest, *, limit: float) -> Iterator[DoctorFinding]:
    """Run all checks in parallel, then the collectives; each of the two within `limit` seconds.

    A check may hang on a name server or a network disk that doesn't answer; it is then abandoned and reported.
    """
    running = {name: _Running(partial(check, request)) for name, check in CHECKS.items()}
    running |= {f"host {host}": _Running(partial(network.reached, host)) for host in request.hosts}
    until = time.monotonic() + limit
    for name, check in running.items():
        with phases.status(partial("looking at {}".format, name)):
            yield from check.findings(name, until)
    with signals_raise():
        for trial in collectives.trials():
            with phases.phase(f"trying collectives of {trial.backend} on {trial.ranks} ranks"):
                yield from collectives.collectives(trial, limit)


class _Running(threading.Thread):
    """Runs a check in a daemon thread, so that a hanging check doesn't keep the process alive."""

    def __init__(self, check: Callable[[], Iterable[DoctorFinding]]) -> None:
        super().__init__(daemon=True)
        self._check = check
        self._found: list[DoctorFinding] = []
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Run the check; its exception is reported by `findings`."""
        try:
            self._found.extend(self._check())
        except Exception as error:
            self._error = error

    def findings(self, name: str, until: float) -> Iterable[DoctorFinding]:
        """Yield the check's findings until the deadline, then its exception or timeout as a finding."""
        self.join(max(0.0, until - time.monotonic()))
        yield from list(self._found)
        if self._error is not None:
            text = f"could not be looked at: {type(self._error).__name__}: {self._error}"
            yield warning(name, text, "look at it by hand, and report this as a fault of samestep")
        elif self.is_alive():
            yield problem(
                name,
                "no answer within the time limit",
                "a name server, a network disk or a host that does not answer: look at it by hand",
            )
