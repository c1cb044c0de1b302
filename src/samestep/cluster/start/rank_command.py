"""The command of a rank: the user's own, behind the entry that gives it cores, threads and its engine's variables."""

import sys
from collections.abc import Sequence

from samestep import environment
from samestep.cluster.binding import BindChoice, check_choice, chosen
from samestep.cluster.contracts import table
from samestep.cluster.machine import this_machine
from samestep.errors import UserError


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
    table.check(engine)
    check_choice(bind)
    if local_ranks is not None:
        chosen(this_machine(), local_ranks, bind)
    threads = threads or environment.asked_threads()
    entry = [sys.executable, "-m", "samestep.cluster.start.rank_entry", "--engine", engine, "--bind", bind]
    return [*entry, *(["--threads", str(threads)] if threads else []), "--", *command]
