"""The command of a rank: checked before any process waits for another, and forked where it is samestep's own."""

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from multiprocessing import forkserver
from typing import NoReturn

from samestep import environment
from samestep.errors import UserError
from samestep.launch import fork_server, rank_entry
from samestep.launch.affinity import BindChoice, check_choice, chosen, this_machine
from samestep.launch.fork_server import end_with_starter
from samestep.launch.script_env import registry


def rank_command(
    command: Sequence[str],
    *,
    engine: str = "torch",
    bind: BindChoice = "auto",
    threads: int | None = None,
    local_ranks: int | None = None,
) -> list[str]:
    """What the elastic agent of this host starts for each rank, so that `command` runs as one.

    `command` is a script of Python's, `-m` and a module, or a program, with its arguments. OMP_NUM_THREADS counts as
    asked for where `threads` doesn't say. With `local_ranks` (ranks that this host gets) a binding that they don't
    fit is refused here. Raises UserError for what the user got wrong.
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
    """The entry's arguments, for `run`, where a rank's command is one of samestep's; None where it is not."""
    words = list(program)
    if fork_server.METHOD != "forkserver" or words[1:3] != _ENTRY or "--" not in words:
        return None
    command = words[words.index("--") + 1 :]
    return words[3:] if command[:2] == _OURS else None


def warm_up() -> None:
    """Let the server import, while this process waits for other hosts."""
    fork_server.preload()
    forkserver.ensure_running()


def run_forked(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """What each new process does; `environ` is that of the agent, over which the rank's own variables stand."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the server ignores them
    environment.adopt(environ)
    end_with_starter()
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # what it prints is seen at once, beside other ranks'
    try:
        (_, _, _, module, *words), variables = rank_entry.prepared(arguments)
    except UserError as error:
        rank_entry.tell(error)
        _end(2)
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


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
