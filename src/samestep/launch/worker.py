"""What the elastic agent starts for each rank: a program, a samestep command, or a function call.

The last two are forked from a server that has imported PyTorch. Commands are checked before any process waits for
another.
"""

import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from samestep import environment, file_errors, streams
from samestep.errors import USERS_MISTAKE, NotSavedError, RankFailedError, UserError, ended_by_code
from samestep.launch import failure, fork_server, rank_entry
from samestep.launch.affinity import BindChoice, check_choice, chosen, this_machine
from samestep.launch.fork_server import end_with_parent, end_with_starter
from samestep.launch.script_env import registry
from samestep.variables import held, hide_from_messages

# A rank's death breaks its peers' connections within milliseconds. A rank that runs a function waits this long
# (seconds) after its failure, so that the agent sees the first death first.
_AFTER_YOU = 0.5


@dataclass(frozen=True, kw_only=True)
class RankEntry:
    """What a rank runs."""

    entrypoint: Callable[..., Any] | str  # a module-level function, or a program
    arguments: Callable[[], tuple[Any, ...]]  # called in every round, after its variables are set
    takes_notice: bool = True  # whether to send it SIGTERM and wait; else it is killed


def entry_of(program: Sequence[str]) -> RankEntry:
    """Return the entry of a command from `rank_command`."""
    words = list(program)
    forked = arguments_of(words)
    if forked is None:
        return RankEntry(entrypoint=words[0], arguments=lambda: tuple(words[1:]))
    _warm_up()
    return RankEntry(entrypoint=run_forked, arguments=lambda: (forked, environment.snapshot()))


def entry_of_call(file: Path) -> RankEntry:
    """Return the entry of a function call that is pickled in a file.

    A file instead of multiprocessing's pipe: a rank that dies before it has read a large call would block this
    process in writing.
    """
    return RankEntry(entrypoint=run_call, arguments=lambda: (str(file), environment.snapshot()), takes_notice=False)


def rank_command(
    command: Sequence[str],
    *,
    engine: str = "torch",
    bind: BindChoice = "auto",
    threads: int | None = None,
    local_ranks: int | None = None,
) -> list[str]:
    """Return the command that the elastic agent starts for each rank, to run `command` as one.

    `command` is a Python script, `-m` and a module, or a program, with its arguments. OMP_NUM_THREADS applies if
    `threads` is None. With `local_ranks` (ranks on this host) a binding that they don't fit is refused here. Raises
    UserError.
    """
    if not command:
        raise UserError("there is no command to start; write it after --, such as -- train.py --lr 3e-4")
    registry.check(engine)
    check_choice(bind)
    if local_ranks is not None:
        chosen(this_machine(), local_ranks, bind)
    threads = threads or environment.asked_threads()
    entry = [sys.executable, "-m", "samestep.launch.rank_entry", "--engine", engine, "--bind", bind]
    return [*entry, *(["--threads", str(threads)] if threads else []), "--", *command]


_ENTRY = ["-m", "samestep.launch.rank_entry"]
_OURS = ["-m", "samestep"]


def arguments_of(program: Sequence[str]) -> list[str] | None:
    """Return the arguments for `run_forked` if the command is samestep's own; None if it isn't."""
    words = list(program)
    if fork_server.METHOD != "forkserver" or words[1:3] != _ENTRY or "--" not in words:
        return None
    command = words[words.index("--") + 1 :]
    return words[3:] if command[:2] == _OURS else None


def _warm_up() -> None:
    """Start the fork server, which imports while this process waits for other hosts."""
    fork_server.preload()
    fork_server.ensure_running()


def _begin(environ: Mapping[str, str]) -> None:
    """Initialize a forked rank; `environ` is the agent's, under the rank's own variables."""
    # The fork server ignores these signals. A rank ends on them at once; the agent decides what follows.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    environment.adopt(environ)
    end_with_starter()
    if fork_server.METHOD == "forkserver":
        end_with_parent()  # with the server, which ends within a second of its starter: also a rank that can't act
    streams.go_on_without()  # its log may lie on a full disk
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # so that output interleaves with other ranks'


def run_forked(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a samestep command as a rank; `arguments` are those of `rank_entry`."""
    _begin(environ)
    try:
        (_, _, _, module, *words), variables = rank_entry.prepared(arguments)
    except UserError as error:
        rank_entry.tell(error)
        _end(USERS_MISTAKE)
    environment.become(variables)
    sys.argv = [module, *words]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code:
        _end(code)


def run_call(file: str, environ: Mapping[str, str]) -> Any:
    """Run a pickled call as a rank, and return its result; a failure is written for the agent."""
    _begin(environ)
    try:
        function, arguments = pickle.loads(Path(file).read_bytes())
        hide_from_messages(held(arguments, environ))
        return function(*arguments)
    except UserError as error:
        _tell(str(error), mistake=type(error).__name__)
        _end(USERS_MISTAKE)
    except NotSavedError as error:  # it says all, and its traceback is samestep's own
        _tell(str(error))
        _end(1)
    except RankFailedError as error:
        _tell(error.reason)
        time.sleep(_AFTER_YOU)
        _end(1)
    except (SystemExit, KeyboardInterrupt) as end:  # the user's code's: a signal ends a rank at once, or is kept
        _tell(ended_by_code(end, "the rank"))
        time.sleep(_AFTER_YOU)
        _end(1)
    except BaseException as error:
        _tell(file_errors.reached_limit(error) or traceback.format_exc())
        time.sleep(_AFTER_YOU)
        _end(1)


def _tell(message: str, *, mistake: str | None = None) -> None:
    """Write this rank's error file, from which the agent reads why it failed."""
    if (file := environment.error_file()) is not None:
        round_ = environment.round_of_rank()
        memory = Path(round_.memory) if round_ is not None and round_.memory is not None else None
        failure.tell(file, message, mistake=mistake, instead=memory)


def _end(code: int) -> NoReturn:
    """Exit at once, without the interpreter's shutdown."""
    # With a normal exit PyTorch would also print every rank's traceback.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
