"""Look at checkpoints, verify their checksums, and convert them to other tools' files and back."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.errors import UserError
from samestep.input_files import path_option

if TYPE_CHECKING:
    from samestep.job import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (add, act) in _COMMANDS.items():
        summary = (act.__doc__ or "").partition("\n")[0]
        subparser = commands.add_parser(name, allow_abbrev=False, help=summary, description=summary)
        add(subparser)
        subparser.set_defaults(act=act)


def run(options: argparse.Namespace) -> int:
    return options.act(options)


def _json_argument(parser: argparse.ArgumentParser) -> None:
    output_files.add_arguments(parser, json="write everything that is shown to a file")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path_option, metavar="FOLDER", help="a run's folder, or one with checkpoints")
    parser.add_argument("--best", metavar="METRIC", help="mark the checkpoint with the best value of a metric")
    parser.add_argument("--lowest", action="store_true", help="with --best: the lowest value is the best")
    _json_argument(parser)


def _list(options: argparse.Namespace) -> int:
    """Show the checkpoints of a run: steps, layouts, sizes, metrics."""
    output_files.check(options, "json")
    if options.lowest and options.best is None:
        raise UserError("--lowest goes with --best METRIC")

    from samestep.checkpoint.inspect import listed
    from samestep.display.checkpoints import print_listed

    checkpoints = listed(options.folder)
    print_listed(checkpoints, options.best, lowest=options.lowest)
    output_files.write_json(options.json, [checkpoint.to_json() for checkpoint in checkpoints])
    return 0


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=path_option, metavar="CHECKPOINT", help="a checkpoint of any format")
    _json_argument(parser)


def _inspect(options: argparse.Namespace) -> int:
    """Show what a checkpoint of any format holds: tensors, shapes, bytes, and what it says of itself."""
    output_files.check(options, "json")

    from samestep.convert.formats import inspect
    from samestep.display.checkpoints import print_contents

    contents = inspect(options.checkpoint)
    print_contents(contents)
    output_files.write_json(options.json, contents.to_json())
    return 0


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=path_option, metavar="CHECKPOINT", help="a checkpoint, or a folder with several"
    )
    _json_argument(parser)


def _verify(options: argparse.Namespace) -> int:
    """Compare a checkpoint's files, or those of all in a folder, with their sums."""
    output_files.check(options, "json")

    from samestep.convert.formats import verified
    from samestep.display.checkpoints import print_verified

    results = verified(options.folder)
    print_verified(results)
    output_files.write_json(
        options.json, [{"path": str(path), **result.to_json()} for path, result in results.items()]
    )
    return 0 if all(result.fault is None for result in results.values()) else 1


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path_option, metavar="SOURCE", help="a checkpoint of any format")
    parser.add_argument("--from", dest="from_", metavar="FORMAT", help="what SOURCE is, where it could be several")
    _target_arguments(parser)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path_option, metavar="SOURCE", help="a checkpoint, or a run: its newest")
    parser.set_defaults(from_="samestep")
    _target_arguments(parser)


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=path_option, metavar="TARGET", help="a file or folder that is not there yet")
    parser.add_argument("--to", metavar="FORMAT", help="what to write, where the name of TARGET doesn't say it")
    parser.add_argument(
        "--job",
        dest="job_file",
        type=path_option,
        metavar="JOB.yaml",
        help="the model's job, for a Hugging Face folder",
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge adapters into their base, which the job's task builds"
    )
    parser.add_argument("--dtype", help="float64, float32, bfloat16 or float16 (default: as it is)")
    parser.add_argument("--shard-size", default="4GB", metavar="SIZE", help="most of one safetensors file (4GB)")


def _convert(options: argparse.Namespace) -> int:
    """Write a model's weights in another tool's format, or make a checkpoint of another tool's."""
    from samestep.convert.convert import convert
    from samestep.display.checkpoints import print_converted

    converted = convert(
        options.source,
        options.target,
        from_=options.from_,
        to=options.to,
        dtype=options.dtype,
        shard_size=options.shard_size,
        job=_job(options.job_file),
        merge=options.merge,
    )
    print_converted(converted)
    return 0


def _export(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint of samestep in another tool's format."""
    return _convert(options)


def _job(file: Path | None) -> "Job | None":
    from samestep import jobfile

    return None if file is None else jobfile.load(file).job


# Each with what adds its arguments and what it does, whose docstring is its summary.
_COMMANDS = {
    "list": (_list_arguments, _list),
    "inspect": (_inspect_arguments, _inspect),
    "verify": (_verify_arguments, _verify),
    "convert": (_convert_arguments, _convert),
    "export": (_export_arguments, _export),
}
