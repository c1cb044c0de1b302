"""`samestep verify --script`: prove that a training script takes, split over processes, the steps of one process."""

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from samestep.cli import output_files
from samestep.durations import add_time_limit
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import MOST_RANKS_A_HOST, MOST_SEED, WholeNumber, whole_of

if TYPE_CHECKING:
    from samestep.script_proof.runs import ScriptProof

_PROCESSES, _STEPS, _TIME_LIMIT = 2, 10, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a script of your own", "run as it stands, alone and split, under a recorder")
    add = group.add_argument
    command = '"train.py --batch-size 16", or "-m package.train", after NAME=VALUE; with --processes N'
    add("--script", metavar="COMMAND", help=command)
    add("--alone", metavar="COMMAND", help="the same with other arguments, for one process")
    add("--then", metavar="COMMAND", help="what goes on where the split run has ended: a resumption")
    add("--every", type=WholeNumber(), metavar="N", help="compare tensors in each N-th step (default: 1)")
    add("--modules", metavar="PATTERN", help='compare tensors of these parameters: "*.layers.0.*"')
    add("--dtype", metavar="TYPE", help="torch's default type before the script begins, such as float64")
    add(
        "--seed",
        type=WholeNumber(least=0, most=MOST_SEED),
        metavar="N",
        help="seed random numbers before the script begins",
    )
    add(
        "--noise",
        choices=("order", "micro-batches"),
        help="how rounding is measured: alone again, with its rows in the opposite order (the default), or in two "
        "micro-batches",
    )
    add_time_limit(group, "one run", _TIME_LIMIT, kept=False)
    add("--keep", type=path_option, metavar="FOLDER", help="keep what was recorded, in a new folder")
    add("--launch", metavar="OPTIONS", help='further options of samestep launch, such as "--hostfile hosts"')


_OWN = ("alone", "then", "every", "modules", "dtype", "seed", "noise", "time_limit", "report", "keep", "launch")
_OF_JOBS = (
    "layout",
    "layouts",
    "precision",
    "micro_batch",
    "checkpoint_every",
    "max_restarts",
    "folder",
    "threads",
    "no_check",
)


def check_absent(options: argparse.Namespace) -> None:
    """Raise UserError for an option of scripts that is given with a job file."""
    if given := [name for name in _OWN if getattr(options, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} goes with --script, a training script of your own")


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 the same step, 1 not, 2 a mistake."""
    proof = _proof(options)
    output_files.check(options, "json", "report")
    if options.report is not None and importlib.util.find_spec("plotly") is None:
        raise UserError('--report needs plotly, which is not installed; pip install "samestep[report]"')
    if options.keep is not None and options.keep.exists():
        raise UserError(f"--keep {options.keep}: it is there already; name a new folder")

    from samestep import environment, subprocess_group
    from samestep.script_proof.compare import prove
    from samestep.script_proof.report import print_verdict

    if environment.ranks() is not None:
        raise UserError("verify --script starts its own processes; start it without a launcher")
    with TemporaryDirectory(prefix="samestep-script-") as scratch, subprocess_group.signals_raise():
        folder = options.keep if options.keep is not None else Path(scratch) / "runs"
        verdict = prove(proof, folder)
    output_files.write_json(options.json, verdict.to_json())
    if options.report is not None:
        from samestep.script_proof.page import page

        output_files.write(options.report, page(verdict, options.script))
    print_verdict(verdict)
    return 0 if verdict.same_step else 1


def _proof(options: argparse.Namespace) -> "ScriptProof":
    """Build a ScriptProof from the options. Raises UserError for wrong options before anything is started."""
    from samestep.launch.launcher import parse_command
    from samestep.launch.script_env import registry
    from samestep.script_proof.runs import ScriptProof, words

    if options.job is not None:
        raise UserError(f"{options.job} is a job file, and --script names a script; leave one of them out")
    if given := [name for name in _OF_JOBS if getattr(options, name) is not None] + ["set"] * bool(options.set):
        raise UserError(f"--{given[0].replace('_', '-')} goes with a job file; a script has its own arguments")
    if options.bits:
        raise UserError("--bits is for run.reduction: ordered of a job file, which a script has not; leave it out")
    engine = options.engine or "torch"
    registry.check(engine)
    registry.check_installed(engine)  # the script alone runs on this host
    commands: Mapping[str, Any] = {
        name: words(f"--{name}", getattr(options, name)) if getattr(options, name) is not None else None
        for name in ("script", "alone", "then")
    }
    launch = parse_command(words("--launch", options.launch, script=False)) if options.launch else ()
    return ScriptProof(
        script=commands["script"],
        alone=commands["alone"],
        then=commands["then"],
        processes=_processes(options.processes),
        engine=engine,
        device=options.device or "auto",
        steps=_STEPS if options.steps is None else options.steps,
        every=1 if options.every is None else options.every,
        modules=options.modules,
        dropout=options.dropout,
        dtype=_dtype(options.dtype),
        seed=options.seed,
        noise=options.noise or "order",
        time_limit=_TIME_LIMIT if options.time_limit is None else options.time_limit,
        launch=launch,
    )


def _processes(given: str | None) -> int:
    return _PROCESSES if given is None else whole_of(given, "--processes", 2, MOST_RANKS_A_HOST)


def _dtype(name: str | None) -> str | None:
    if name not in (None, "float64", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {name}: use float64, float32, bfloat16 or float16")
    return name
