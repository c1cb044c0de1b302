"""Start ranks on this machine by PyTorch's elastic agent, and bring back what they return or why they failed."""

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep import environment
from samestep.errors import InterruptedJobError, RankFailedError, UserError
from samestep.launch import fork_server, single_node_rendezvous
from samestep.launch.failure import ended_by
from samestep.launch.fork_server import end_with_starter
from samestep.launch.torch_elastic import silent_agent

# A rank whose peer died sees its connection break within milliseconds. It waits this long (seconds) before it
# ends itself, so that the agent meets the death that was first.
_AFTER_YOU = 0.5

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

_CALL = "call.pickle"


def start(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    processes: int,
    *,
    signals_taken: Collection[str] = (),
) -> Any:
    """Call `function(*arguments)` in each of `processes` new ranks, and return what rank 0 returned.

    `signals_taken` are names of signals that the caller handles itself; any other ends the ranks.
    Raises RankFailedError with the first failing rank's traceback, UserError where that rank raised one,
    InterruptedJobError where a signal stopped the job. No process is left running, whatever happens.
    """
    _check_main_guard()
    fork_server.preload()
    single_node_rendezvous.register()
    call = _pickled(function, arguments)
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder, _signal_handlers_kept(), silent_agent():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=single_node_rendezvous.BACKEND,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            start_method=fork_server.METHOD,
            signals_to_handle=",".join(name for name in _SIGNALS if name not in signals_taken),
        )
        # A file, not the pipe that starts a process: a rank that dies before it has read a large call from the
        # pipe would leave this process writing for ever.
        (Path(folder) / _CALL).write_bytes(call)
        try:
            with environment.agent_settings():
                results = elastic_launch(config, _run_rank)(folder, environment.snapshot(), fork_server.Streams())
        except ChildFailedError as error:
            raise _first_failure(Path(folder), error) from None
        except SignalException as error:
            raise InterruptedJobError(int(error.sigval)) from None
        except KeyboardInterrupt:
            raise InterruptedJobError(signal.SIGINT) from None
        finally:
            _show_cursor()
        return results[0]


def _run_rank(folder: str, environ: Mapping[str, str], streams: fork_server.Streams) -> Any:
    """What each new process does."""
    streams.take()
    environment.adopt(environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the agent decides; a rank ends at once, wherever it is
    end_with_starter()
    try:
        function, arguments = pickle.loads((Path(folder) / _CALL).read_bytes())
        return function(*arguments)
    except BaseException as error:
        _write_failure(Path(folder), error)
        if not isinstance(error, UserError):
            time.sleep(_AFTER_YOU)
        # The agent would print the traceback of every rank; the failure file says all.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _write_failure(folder: Path, error: BaseException) -> None:
    ranks = environment.ranks()
    rank = ranks.rank if ranks else 0
    failure = {
        "rank": rank,
        "time": time.time(),
        "user_error": type(error).__name__ if isinstance(error, UserError) else None,
        "message": str(error),
        "reason": traceback.format_exc(),
    }
    new = folder / f"new-failure-{rank}.json"  # this rank may be ended while it writes
    new.write_text(json.dumps(failure), encoding="utf-8")
    new.replace(folder / f"failure-{rank}.json")


def _first_failure(folder: Path, error: ChildFailedError) -> Exception:
    """The root cause: the first written reason, unless the rank that the agent met died without a word."""
    rank, failure = error.get_first_failure()
    written = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("failure-*.json")]
    if not any(reason["rank"] == rank for reason in written):
        return RankFailedError(rank, _exit_reason(failure.exitcode))
    first = min(written, key=lambda reason: reason["time"])
    if first["user_error"] is not None:
        kinds = {kind.__name__: kind for kind in (UserError, *UserError.__subclasses__())}
        return kinds.get(first["user_error"], UserError)(first["message"])
    return RankFailedError(first["rank"], first["reason"])


def _exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} and gave no reason; what it printed stands above"
    return f"its process was {ended_by(-exit_code)}"


def _check_main_guard() -> None:
    if fork_server.imports_main_again():
        raise UserError(
            "samestep starts ranks that import your script again, and the script starts a job as it is imported; "
            'put the call under `if __name__ == "__main__":`'
        )


def _pickled(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((function, tuple(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"a task or engine object can't be sent to the ranks: {error}; "
            "define its class at the top level of a module, and open files and models in its methods"
        ) from None


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent puts its own handlers in place and leaves them there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.Signals[name] for name in _SIGNALS]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    """A rank that was stopped in the middle of its progress bar left the cursor hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
