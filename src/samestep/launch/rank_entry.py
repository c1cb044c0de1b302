"""Entry point of a rank: binds it to its cores, sets threads and the engine's variables, and execs the user's script.

`python -m samestep.launch.rank_entry [--engine NAME] [--bind CHOICE] [--threads N] -- script.py ...`, started for
each rank by a launcher. The process id stays, so that the starter still watches the right process.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from samestep import environment
from samestep.errors import USERS_MISTAKE, UserError
from samestep.launch.affinity import bind, bindings, check_choice, this_machine
from samestep.launch.fork_server import end_with_parent
from samestep.launch.network import for_messages
from samestep.launch.script_env import registry, sidecar
from samestep.limits import MOST_THREADS, WholeNumber
from samestep.ranks import Ranks

# If all ranks of a host make the same mistake, the launcher ends all when the first has ended. The others wait this
# long (seconds), so that it is reported once.
_AFTER_YOU = 0.5


def main(arguments: Sequence[str]) -> int:
    """Exec the user's command; returns only on failure."""
    try:
        _become(arguments)
    except UserError as error:
        tell(error)
        return USERS_MISTAKE


def tell(error: UserError) -> None:
    """Print a mistake; ranks other than the host's first wait, so that it is usually printed once."""
    ranks = _ranks_if_readable()
    if ranks is not None and ranks.local_rank > 0:
        time.sleep(_AFTER_YOU)
    print(f"samestep: {error}", file=sys.stderr, flush=True)


def _become(arguments: Sequence[str]) -> NoReturn:
    """Become the rank's program by exec: the process id stays, on which the agent has a handle."""
    end_with_parent()
    started, environ = prepared(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(started[0], started, environ)


def prepared(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Bind this rank to its cores; return the command to exec and its environment."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = _parser().parse_args(arguments[:end]), arguments[end + 1 :]
    check_choice(options.bind)
    registry.check(options.engine)
    program = _program(command)
    ranks = environment.ranks()
    if ranks is None:
        raise UserError(
            "this process is no rank: neither RANK nor WORLD_SIZE is set; samestep launch and torchrun do so"
        )
    own = bindings(this_machine(), ranks.local_world_size, options.bind)[ranks.local_rank]
    bind(own)
    threads = options.threads or environment.asked_threads() or own.threads
    environ = environment.snapshot()
    expected = registry.expected(options.engine, ranks, environ, threads)
    started = [*program, *expected.arguments, *command[_own_words(command) :]]
    if expected.sidecar is not None:
        started = sidecar.until_rank_ends(*expected.sidecar, started)
    between_hosts = environment.variables_of_interface(for_messages(ranks, environ), environ, gloo_alone=True)
    return started, {**environ, **between_hosts, **environment.share(threads), **expected.variables}


def _own_words(command: Sequence[str]) -> int:
    """Count the words that name the program; its arguments follow."""
    return 2 if command[0] == "-m" else 1


def _program(command: Sequence[str]) -> list[str]:
    """Return the program without its arguments: Python with a script or a module, or an executable."""
    if not command:
        raise UserError("there is no command to start; write it after --, such as -- train.py --lr 3e-4")
    check_command(command, os.uname().nodename)
    python = [sys.executable, "-u"]  # unbuffered, so that output interleaves with other ranks'
    if command[0] == "-m":
        return [*python, "-m", command[1]]
    return [*python, command[0]] if command[0].endswith(".py") else [command[0]]


def _ranks_if_readable() -> Ranks | None:
    """Return the rank from the launcher's variables; None if they are contradictory."""
    try:
        return environment.ranks()
    except UserError:
        return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"the entry of a rank: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m samestep.launch.rank_entry", allow_abbrev=False)
    parser.add_argument("--engine", default="torch", help="whose scripts' variables to set")
    parser.add_argument("--bind", default="auto", help="auto, none, cores or numa")
    parser.add_argument(
        "--threads", type=WholeNumber(most=MOST_THREADS), help="a rank's; the cores shared out where it isn't said"
    )
    return parser


_OWN_PROGRAMS = ("-m", "samestep")


JOB_FILES = (".yaml", ".yml")


def check_command(command: Sequence[str], host: str) -> None:
    """Raise UserError where a command can't be started here."""
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise UserError("-m names no module; write it after -m")
        if is_ours(command) and (job := _job_file(command)) is not None and not is_file(job):
            raise UserError(f"there is no job file {job} in {Path.cwd()} on {host}")
    elif first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f"there is no script {first} in {Path.cwd()} on {host}")
    elif shutil.which(first) is None:
        raise UserError(
            f"there is no program {first} on {host}; a script of Python's has a name that ends in .py, "
            "and a module stands behind -m"
        )


def is_ours(command: Sequence[str]) -> bool:
    """Whether it is one of samestep's own commands."""
    return tuple(command[:2]) == _OWN_PROGRAMS


def is_file(word: str) -> bool:
    """Whether a word of a command names a file that is there."""
    try:
        return Path(word).is_file()
    except OSError:  # it is too long for a name
        return False


def _job_file(command: Sequence[str]) -> str | None:
    """The job file among the words of a command of samestep's."""
    return next((word for word in command if word.endswith(JOB_FILES) and "=" not in word), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
