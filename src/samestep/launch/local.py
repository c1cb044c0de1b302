"""Start ranks of a function on this host, by the agent that starts those of any job, and bring back what they return.

A training's are looked after: they start again from the last checkpoint when one has failed.
"""

import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep import environment, file_errors
from samestep.errors import InterruptedJobError, RankFailedError, StartError, UserError
from samestep.fault_tolerance.preemption import Signals
from samestep.fault_tolerance.scratch import scratch
from samestep.fault_tolerance.signals import ASKING, ENDING
from samestep.fault_tolerance.status import JobInfo
from samestep.job import Job
from samestep.launch import fork_server
from samestep.launch.elastic_agent import AgentSpec, HungError, Supervision, silent_agent
from samestep.launch.elastic_agent import run as run_agent
from samestep.launch.endings import ended_by
from samestep.launch.failure import Failure, first_of, has_error_file, user_error_of
from samestep.launch.logs import Follower, RankFiles
from samestep.launch.pickled_calls import pickled
from samestep.launch.rendezvous import SingleNodeRendezvous
from samestep.launch.rounds import RanksEnded
from samestep.launch.worker import entry_of_call
from samestep.layout import Layout
from samestep.run_folder import LOGS

_HOST = "localhost"  # in the paths of the ranks' logs

# A function and its arguments.
Call = tuple[Callable[..., Any], Sequence[Any]]


class JobOnRanks(Protocol):
    """A job that has been checked, and the layout of its ranks."""

    @property
    def job(self) -> Job: ...

    @property
    def layout(self) -> Layout: ...


OnRanks = TypeVar("OnRanks", bound=JobOnRanks)


def start(function: Callable[..., Any], arguments: Sequence[Any], processes: int) -> Any:
    """Call `function(*arguments)` in each of `processes` new ranks, and return what rank 0 returned.

    Raises RankFailedError with the first failing rank's traceback, UserError where that rank raised one,
    InterruptedJobError where a signal stopped the job. No process is left running, whatever happens.
    """
    with _place() as place:
        _write((function, arguments), place)
        return _run(place, place / LOGS, processes)


def train(
    ready: OnRanks, folder: Path, *, call: Callable[[OnRanks], Call], shrink: Callable[[OnRanks], OnRanks | None]
) -> Any:
    """Train in rounds until one ends well, and return what its rank 0 returned; `folder` is the run's.

    Each rank of the layout does `call(ready)`; `shrink` gives the job with fewer ranks, None if there is none. Raises
    as `start` does, RankFailedError when restarts are used up. Where the training can be saved, SIGTERM and Ctrl-C
    let the ranks take one more step, save and return.
    """
    run = ready.job.run
    with ExitStack() as stack:
        place = stack.enter_context(_place())
        signals = None
        if run.checkpoint is not None:
            signals = stack.enter_context(Signals(grace_period=run.grace_period))
        training = _Training(ready, folder, place, call, shrink)
        supervision = Supervision(known=training.known, signals=signals, shrink=training.shrink)
        try:
            return _run(
                place,
                folder / LOGS,
                ready.layout.size,
                max_restarts=run.max_restarts,
                supervision=supervision,
            )
        except (RankFailedError, SignalException):  # SignalException: a second signal
            if signals is None or signals.number is None:
                raise
            raise InterruptedJobError(signals.number) from None


class _Training(Generic[OnRanks]):
    """The job, layout and call of the current round."""

    def __init__(
        self,
        ready: OnRanks,
        folder: Path,
        place: Path,
        call: Callable[[OnRanks], Call],
        shrink: Callable[[OnRanks], OnRanks | None],
    ) -> None:
        self._ready = ready
        self._folder = folder
        self._place = place
        self._call = call
        self._shrink = shrink
        _write(call(ready), place)

    def known(self) -> JobInfo:
        """Return the job's facts for the watchdog and the rounds, before a rank publishes them."""
        run = self._ready.job.run
        return JobInfo(
            hang_limit=run.hang_limit,
            grace_period=run.grace_period,
            layout=str(self._ready.layout),
            run_folder=str(self._folder.absolute()),
        )

    def shrink(self) -> int | None:
        """Switch to a smaller layout, if the job is elastic, after a rank is lost for good; return its size."""
        smaller = self._shrink(self._ready) if self._ready.job.run.elastic else None
        if smaller is None:
            return None
        self._ready = smaller
        _write(self._call(smaller), self._place)
        return smaller.layout.size


def _run(
    place: Path,
    logs: Path,
    processes: int,
    *,
    max_restarts: int = 0,
    supervision: Supervision | None = None,
) -> Any:
    """Run the elastic agent; signals that `supervision` handles are left to it, any other ends the ranks."""
    taken = ASKING if supervision is not None and supervision.signals is not None else ()
    with ExitStack() as stack:
        stack.enter_context(_signal_handlers_kept())
        stack.enter_context(silent_agent())
        stack.callback(_show_cursor)
        follower = stack.enter_context(Follower(prefixes=False, bars=True))
        files = RankFiles(logs, _HOST, follower, otherwise="use another run.folder")
        stack.enter_context(environment.given({}))  # restores the variables that each round sets for its ranks
        stack.enter_context(environment.agent_settings())
        spec = AgentSpec(
            hosts=SingleNodeRendezvous(uuid.uuid4().hex),
            num_procs=processes,
            entry=entry_of_call(place / _CALL),
            files=files,
            explain=partial(_ranks_ended, files),
            max_restarts=max_restarts,
            signals=",".join(number.name for number in ENDING if number not in taken),
            supervision=supervision or Supervision(),
        )
        try:
            return run_agent(spec)[0]
        except ChildFailedError as error:
            raise _first_failure(files, error.failures) from None
        except HungError as error:
            raise RankFailedError(error.hang.rank, error.hang.reason) from None
        except SignalException as error:
            raise InterruptedJobError(int(error.sigval)) from None
        except KeyboardInterrupt:
            raise InterruptedJobError(signal.SIGINT) from None


def _first_failure(files: RankFiles, failures: Mapping[int, ProcessFailure]) -> RankFailedError | UserError:
    """Return the error of the rank that failed first."""
    first = first_of(failures, _HOST, files.here)
    failed = failures[first.rank]
    mistake = user_error_of(failed)
    if mistake is not None:
        return mistake
    return RankFailedError(first.rank, first.reason if has_error_file(failed) else _exit_reason(first))


def _ranks_ended(files: RankFiles, failures: Mapping[int, ProcessFailure]) -> RanksEnded:
    """Return the rank that failed first, and why, to end a round."""
    first = first_of(failures, _HOST, files.here)
    failure = _first_failure(files, failures)
    reason = failure.reason if isinstance(failure, RankFailedError) else str(failure)
    return RanksEnded(rank=first.rank, reason=reason, at=first.at, follows=first.follows)


def _exit_reason(failure: Failure) -> str:
    """Describe the end of a rank without an error file."""
    if failure.end:
        return failure.end
    if failure.exit_code >= 0:
        return (
            f"its process ended with exit code {failure.exit_code} and gave no reason; what it printed stands above"
        )
    return f"its process was {ended_by(-failure.exit_code)}"


_CALL = "call.pickle"


def check_not_importing() -> None:
    """Raise UserError in a rank that only imports the script that started it, where the script starts a job again."""
    if fork_server.imports_main_again():
        raise UserError(
            "samestep starts ranks that import your script again, and the script starts a job as it is imported; "
            'put the call under `if __name__ == "__main__":`'
        )


@contextmanager
def _place() -> Iterator[Path]:
    """Create a scratch folder for a start. Raises UserError if this process can't start ranks."""
    check_not_importing()
    fork_server.preload()
    with scratch("samestep-start-") as folder:
        yield folder


def _write(call: Call, place: Path) -> None:
    """Write the pickled call for the ranks. Raises UserError if it can't be pickled, or they could not load it.

    Raises StartError if there is no room for it.
    """
    data = pickled(*call)
    try:
        (place / _CALL).write_bytes(data)
    except OSError as error:
        elsewhere = "point TMPDIR to a folder with room"
        reason = file_errors.reason_of(error, place, elsewhere=elsewhere, needs=len(data))
        raise StartError(f"the task can't be handed to the ranks in {place}: {reason}") from None


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers afterwards: the elastic agent replaces them and doesn't."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    """Show the cursor, which a rank killed within its progress bar leaves hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
