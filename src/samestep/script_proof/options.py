"""Options of a script's proof, which `samestep verify --script` and `samestep-prove` have alike, and what they do."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.durations import add_time_limit
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import MOST_RANKS_A_HOST, MOST_SEED, WholeNumber, whole_of

if TYPE_CHECKING:
    from samestep.script_proof.runs import ScriptProof, Starter

PROCESSES, STEPS, TIME_LIMIT = 2, 10, 600.0
NAMES = (
    "on",
    "tiny",
    "alone",
    "alone_processes",
    "then",
    "every",
    "modules",
    "dtype",
    "seed",
    "noise",
    "time_limit",
    "format",
    "sarif",
    "keep",
)


def add_arguments(parser: "argparse._ActionsContainer") -> None:
    """Add the options that only a script's proof has: those of `NAMES`."""
    add = parser.add_argument
    add(
        "--on",
        metavar="DEVICE",
        help="where accelerators that the script names are: cpu, or gpu:0 for all ranks on one of them over gloo",
    )
    add("--tiny", action="store_true", default=None, help="models of transformers are made with two layers")
    add("--alone", metavar="COMMAND", help="the same with other arguments, for one process")
    add("--alone-processes", metavar="N", help="ranks of the run alone, for a script that needs several (default: 1)")
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
    add_time_limit(parser, "one run", TIME_LIMIT, kept=False)
    add("--format", choices=("text", "github"), help="github: also a line that GitHub shows in the script's file")
    add("--sarif", type=path_option, metavar="FILE", help="write the verdict as SARIF, for code scanning")
    add("--keep", type=path_option, metavar="FOLDER", help="keep what was recorded, in a new folder")


def read(
    options: argparse.Namespace, script: str, *, flag: str, engine: str = "torch", launch: Sequence[str] = ()
) -> "ScriptProof":
    """Build a ScriptProof from parsed options. Raises UserError for wrong ones, before anything is started.

    `flag`: what `script` is called in messages.
    """
    from samestep.script_proof.runs import ScriptProof, words

    return ScriptProof(
        script=words(flag, script),
        alone=words("--alone", options.alone) if options.alone is not None else None,
        then=words("--then", options.then) if options.then is not None else None,
        processes=_processes(options.processes),
        alone_processes=_alone_processes(options),
        engine=engine,
        device=_device(options),
        on=options.on,
        tiny=bool(options.tiny),
        steps=STEPS if options.steps is None else options.steps,
        every=1 if options.every is None else options.every,
        modules=options.modules,
        dropout=options.dropout,
        dtype=_dtype(options.dtype),
        seed=options.seed,
        noise=options.noise or "order",
        time_limit=TIME_LIMIT if options.time_limit is None else options.time_limit,
        launch=tuple(launch),
    )


def check_outputs(options: argparse.Namespace, *, install: str) -> None:
    """Raise UserError where a file or folder can't be written; `install`: the command for what a page needs."""
    output_files.check(options, "json", "report", "sarif")
    output_files.check_report(options, install=install)
    if options.keep is not None and options.keep.exists():
        raise UserError(f"--keep {options.keep}: it is there already; name a new folder")


def run(proof: "ScriptProof", options: argparse.Namespace, starter: "Starter", script: str) -> int:
    """Prove the script, and print and write the verdict. Exit codes: 0 the same step, 1 not."""
    from samestep import environment, subprocess_group
    from samestep.script_proof.annotations import github, place_of, sarif
    from samestep.script_proof.compare import prove
    from samestep.script_proof.forked import forking
    from samestep.script_proof.report import print_verdict

    if environment.ranks() is not None:
        raise UserError("the proof of a script starts its own processes; start it without a launcher")
    with TemporaryDirectory(prefix="samestep-script-") as scratch, subprocess_group.signals_raise():
        folder = options.keep if options.keep is not None else Path(scratch) / "runs"
        with forking(proof, starter) as quick:
            verdict = prove(proof, folder, quick)
        place = place_of(verdict.finding, folder) if verdict.finding is not None else None
    output_files.write_json(options.json, verdict.to_json())
    output_files.write_json(options.sarif, sarif(verdict, place))
    if options.format == "github":
        print(github(verdict, script, place))
    if options.report is not None:
        from samestep.script_proof.page import page

        output_files.write(options.report, page(verdict, script))
    print_verdict(verdict)
    return 0 if verdict.same_step else 1


def _device(options: argparse.Namespace) -> str:
    """`--device`, which `--on` decides where it is given."""
    if options.on is None:
        return options.device or "auto"
    if re.fullmatch(r"cpu|gpu:\d+", options.on) is None:
        raise UserError(f"--on {options.on}: use cpu, or gpu:0 with the number of an accelerator")
    if options.device is not None:
        raise UserError(f"--on {options.on} says where the script runs; leave --device {options.device} out")
    return "cpu" if options.on == "cpu" else "auto"


def _processes(text: str | None) -> int:
    return PROCESSES if text is None else whole_of(text, "--processes", 2, MOST_RANKS_A_HOST)


def _alone_processes(options: argparse.Namespace) -> int:
    """Of the run that the split one is compared with. Raises UserError for as many as that has."""
    if options.alone_processes is None:
        return 1
    processes = _processes(options.processes)
    alone = whole_of(options.alone_processes, "--alone-processes", 1, MOST_RANKS_A_HOST)
    if alone >= processes:
        raise UserError(
            f"--alone-processes {alone}: the split run has {processes}, which are compared with fewer; pass more "
            "with --processes"
        )
    return alone


def _dtype(name: str | None) -> str | None:
    if name not in (None, "float64", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {name}: use float64, float32, bfloat16 or float16")
    return name
