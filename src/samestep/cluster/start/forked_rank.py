"""Ranks of samestep's own commands are forked from a server that has imported PyTorch, and so start anew at once.

Any other command is a process of its own. What a rank does before its command begins is the same.
"""

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
from samestep.cluster.start import fork_server, rank_entry
from samestep.cluster.start.parent import end_with_starter
from samestep.errors import UserError

_ENTRY = ["-m", "samestep.cluster.start.rank_entry"]
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


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
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
