"""Options of every command with a job file; they override the file's values."""

import argparse
import gc
import importlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.progress import phases

if TYPE_CHECKING:
    from samestep.job import Job
    from samestep.jobfile import LoadedJob


# Flag -> the key of the job that it sets.
FLAGS = {
    "layout": ("run.layout", 'how to split it: "dp2", "ddp", "single", ...; of train also "auto"'),
    "processes": ("run.processes", "number of processes, for a layout without a size"),
    "engine": ("run.engine", "who takes the step"),
    "micro-batch": ("run.micro_batch", "most samples of one forward on one rank"),
    "threads": ("run.threads", "threads a process (default: cores / processes)"),
    "device": ("run.device", "auto or cpu"),
    "checkpoint-every": ("run.checkpoint.every", "save the training's state every so many steps, or every 10m"),
    "max-restarts": ("run.max_restarts", "times that all ranks start again after one has failed (default: 0)"),
    "folder": ("run.folder", "where the run's files go (default: a new folder under runs/)"),
}

# Flags that some commands add themselves.
_OWN_FLAGS = {
    "resume": ("run.checkpoint.resume", ""),
    "accept-data-change": ("run.checkpoint.accept_data", ""),
    "no-check": ("run.check", ""),
    "profile": ("run.profile.folder", ""),
}

_SHOWN = 160  # characters of a --set in messages

# The value of a flag that is given without one, and the key and value that such a flag sets.
BARE = ""
_BARE_FLAGS = {"profile": ("run.profile", "{}")}


class Once(argparse.Action):
    """Action of a flag that may be given once; argparse would silently take the last value."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "it stands twice; keep one of them")
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser, without: Collection[str] = (), *, job: bool = True) -> None:
    """Add the options of a job. `job`: whether the job file is required."""
    parser.add_argument("job", type=path_option, nargs=None if job else "?", metavar="JOB.yaml", help="the job file")
    for flag, (_, text) in FLAGS.items():
        if flag in without:
            continue
        parser.add_argument(f"--{flag}", metavar=flag.replace("-", "_").upper(), help=text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key of the job, such as recipe.optimizer.lr=1e-3; may stand many times",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole job and where each value came from, and stop"
    )


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-check",
        action="store_const",
        const="false",
        help="leave out the check of the task's contract, which takes a second or two in one process",
    )


def load(
    options: argparse.Namespace, file: Path | None = None, *, also: Sequence[tuple[str, str, str]] = ()
) -> "LoadedJob":
    """Load the job file (or `file`) with the command line's overrides. Raises UserError.

    `also`: key, value and source of what other options of the command set.
    """
    from samestep import environment, jobfile
    from samestep.cli import hyperparameters

    keys = {flag: key for flag, (key, _) in {**FLAGS, **_OWN_FLAGS}.items()}
    overrides = hyperparameters.overrides(environment.snapshot(), keys)
    for text in options.set:
        key, separator, value = text.partition("=")
        if not separator:
            raise UserError(f"--set {text[:_SHOWN]}: write KEY=VALUE, such as recipe.optimizer.lr=1e-3")
        overrides.append(
            (key.strip(), value, f"--set {text}" if len(text) <= _SHOWN else f"--set {text[:_SHOWN]}...")
        )
    for flag, key in keys.items():
        value = getattr(options, flag.replace("-", "_"), None)
        if value is not None:
            if value == BARE and flag in _BARE_FLAGS:
                key, value = _BARE_FLAGS[flag]
            overrides.append((key, value, f"--{flag}"))
    loaded = jobfile.load(file or options.job, [*overrides, *also])
    for remark in loaded.remarks if is_main() else ():
        print(f"samestep: {remark}", file=sys.stderr)
    return loaded


def prepare(job: "Job", options: argparse.Namespace) -> None:
    """Import what training needs (this takes seconds), and start the fork server for the job's ranks.

    The server is a fork of this process. Where a user's program called `main`, it is a new process, which imports
    meanwhile.
    """
    with phases.status(lambda: "importing PyTorch"), _uncollected():
        from samestep.launch import fork_server
        from samestep.rank_imports import rank_imports

        if not options.own_process:
            fork_server.start_early(rank_imports(job), ranks=_ranks_of(job))
        importlib.import_module("samestep.api")
        if options.own_process:
            fork_server.fork_early(rank_imports(job), ranks=_ranks_of(job))


def _ranks_of(job: "Job") -> int:
    """The ranks of a job that isn't checked yet; several where their number is open, one where a mistake hides it."""
    from samestep.layout import Layout, unsized

    layout, processes = job.run.layout, job.run.processes
    try:
        return 2 if unsized(layout) and processes is None else Layout.parse(layout, processes).size
    except UserError:
        return 1


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend garbage collection during imports, and freeze what they made.

    Imports make hundreds of thousands of objects that stay. Collections during the imports take a tenth of their
    time; those after them and at exit take tenths of a second unless the objects are frozen.
    """
    was_enabled = gc.isenabled()
    first = "samestep.api" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if first:
                gc.freeze()
            gc.enable()


def print_config(loaded: "LoadedJob") -> int:
    from samestep import jobfile

    sys.stdout.write(jobfile.dump(loaded, written=True) + "\n")
    return 0


def is_main() -> bool:
    """Whether this process prints messages: rank 0, or one that no launcher started."""
    from samestep import environment

    return environment.is_first_rank()


def tell_launcher(message: str) -> bool:
    """Write a message to the error file that samestep's agent reads; return whether this rank has one."""
    from samestep import environment

    if (file := environment.error_file()) is None:
        return False

    from samestep.launch.failure import tell

    tell(file, message)
    return True
