"""`samestep`: find the command, run it, and turn what went wrong into one message and an exit code."""

import argparse
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from samestep import environment, file_errors, private_folders, streams
from samestep.cli import (
    chat,
    check,
    checkpoint,
    comm,
    compare,
    data,
    doctor,
    drill,
    evaluate,
    hosts,
    hyperparameters,
    init,
    job_options,
    launch,
    layout,
    plan,
    predict,
    schema,
    train,
    translate,
    tune,
    verify,
)
from samestep.cli.suggestions import subparsers, unknown_command, unknown_option
from samestep.durations import duration_text
from samestep.errors import (
    USERS_MISTAKE,
    InterruptedJobError,
    NonFiniteError,
    NotSavedError,
    RankFailedError,
    StartError,
    UserError,
    ended_by_code,
    place_of,
)
from samestep.progress import phases
from samestep.variables import without_values

# As the help shows them.
GROUPS: Mapping[str, tuple[ModuleType, ...]] = {
    "train and check": (init, translate, train, verify, check, evaluate, predict, chat, compare, tune),
    "look": (data, layout, plan, checkpoint, schema, doctor),
    "clusters": (launch, hosts, comm, drill),
}
COMMANDS = tuple(command for group in GROUPS.values() for command in group)

_COMMAND = "COMMAND"  # in the help, and in argparse's messages about it
_FIRST_TELLS = 2.0  # seconds that other ranks wait, so that rank 0 prints the message that all have


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 failed or not the same step, 2 the user's mistake, 128 + n signal n."""
    if arguments is None:  # else a program of a user's has called, whose streams are its own
        streams.open_closed()
        streams.go_on_without()
    code = _run(arguments)
    if arguments is None and (reason := streams.refused_output()) is not None:
        print(f"samestep: standard output can't be written: {reason}", file=sys.stderr)
        return code or int(not {"train", "launch"} & set(sys.argv[1:2]))  # what they make is no output
    return code


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command, and turn what went wrong into a message and an exit code."""
    try:
        _check_place()
        words_given = sys.argv[1:] if arguments is None else arguments
        if wrong := next((word for word in words_given if "\0" in word), None):
            raise UserError(f"{wrong[:60]!r} has the character NUL, which no argument can have")
        words = list(hyperparameters.without(words_given, environment.snapshot()))
        secret = environment.take_job_secret()  # before any process is started
        if not words:  # nothing was asked for: the help, as in git, pip and docker
            _parser().print_help()
            return 0
        options = _parser().parse_args(words)
        options.job_secret = secret
        options.command_line = words
        options.own_process = arguments is None  # else a program of a user's has called
        private_folders.temporary_folder()  # also that of libraries
        with environment.progress_every(options.progress), phases.running(options.title):
            return options.run(options)
    except UserError as error:
        # All ranks of a launcher raise the same error before they meet; rank 0 prints it.
        by_launcher = job_options.tell_launcher(_told(error))
        if job_options.is_main():
            print(_told(error), file=sys.stderr)
        elif not by_launcher:
            with suppress(KeyboardInterrupt):
                time.sleep(_FIRST_TELLS)  # a launcher ends the others as soon as one rank has ended
        return USERS_MISTAKE
    except (RankFailedError, StartError) as error:
        print(_told(error), file=sys.stderr)
        return 1
    except (NonFiniteError, NotSavedError) as error:
        if job_options.is_main():
            print(_told(error), file=sys.stderr)
        return 1
    except InterruptedJobError as error:
        print(_told(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("samestep: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:
        if place_of(end) is None:  # of argparse, after --help
            raise
        print(f"samestep: {ended_by_code(end, 'code of the job')}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError, MemoryError) as error:
        reason = file_errors.refused(error) if isinstance(error, OSError) else file_errors.reached_limit(error)
        if reason is None:
            raise
        print(f"samestep: {reason}", file=sys.stderr)
        return 1


def _check_place() -> None:
    """Raise UserError if the folder that this process works in is gone: PyTorch ends without a word there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that this command started in is no longer there; cd to another one") from None
    except PermissionError:
        raise UserError("the folder that this command started in may not be read; cd to another one") from None


def _told(error: BaseException) -> str:
    """The message of an error, without what the variables of the job file hold."""
    return f"samestep: {without_values(str(error))}"


class _Parser(argparse.ArgumentParser):
    """Parser that raises UserError, which is printed as one message without the usage."""

    _words: Sequence[str] = ()

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Refuse unknown words where the command is known; argparse leaves them to the outermost parser."""
        self._words = list(arguments[0] or ()) if arguments else ()
        namespace, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            option = next((word for word in unknown if word.startswith("-") and word != "--"), None)
            if option is not None:
                raise UserError(unknown_option(option, self, _parser()))
            dashes = _DASHES.match(unknown[0])
            if dashes is not None:
                word, dash = _in_quotes(unknown[0]), unicodedata.name(dashes[0][0]).lower()
                option = _in_quotes(f"--{unknown[0][dashes.end() :]}")
                raise UserError(f"{word} begins with an {dash}, as word processors write it; write {option}")
            raise UserError(f"{self.prog} takes no {_in_quotes(unknown[0])}; `{self.prog} --help` says what it takes")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        if message.startswith(f"argument {_COMMAND}: invalid choice"):
            # argparse takes the value of an unknown option for a command, and would only tell of the value.
            options = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
            unknown = [option for option in options if option not in self._option_string_actions]
            if unknown:
                raise UserError(unknown_option(unknown[0], self, _parser()))
            commands = list(subparsers(self))
            word = next(word for word in self._words if not word.startswith("-") and word not in commands)
            raise UserError(unknown_command(word, self, commands))
        raise UserError(f"{message}; `{self.prog} --help` says what there is")


_DASHES = re.compile("[\u2010-\u2015\u2212]-?")  # what becomes of the two hyphens of an option elsewhere


def _in_quotes(word: str) -> str:
    return f'"{word if len(word) <= 60 else word[:57] + "..."}"'


class _Version(argparse.Action):
    """Prints the installed version, which is looked up for this alone."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from samestep import __version__

        print(f"samestep {__version__}")
        parser.exit()


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="samestep",
        allow_abbrev=False,
        description="Train a PyTorch model over several processes, and check that every layout\n"
        "takes the same step as one process.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version of samestep and exit")
    # Each command has its row below a title of its group, which argparse can't do: it lists all in one place.
    commands = parser.add_subparsers(
        title="commands", metavar=_COMMAND, required=True, help="`samestep COMMAND --help` lists its options"
    )
    for title, group in GROUPS.items():
        parser.add_argument_group(title, "\n".join(map(_row, group)))
    for command in COMMANDS:
        name = _name(command)
        subparser = commands.add_parser(name, allow_abbrev=False, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, title=name, progress=None)
        _add_progress(subparser)
    return parser


def _name(command: ModuleType) -> str:
    return command.__name__.rpartition(".")[2]


def _row(command: ModuleType) -> str:
    """A command's row in the help: its name, and what it does, in as many lines as the terminal needs."""
    summary = (command.__doc__ or "").strip().partition("\n")[0]
    width = max(40, shutil.get_terminal_size().columns - 4)  # argparse indents a group by 2, and leaves 2 free
    return textwrap.fill(
        summary, width, initial_indent=f"{_name(command):<12}", subsequent_indent=" " * 12, break_on_hyphens=False
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--progress` to a command, and to those inside it."""
    parser.add_argument(
        "--progress",
        type=_progress_interval,
        default=argparse.SUPPRESS,  # what stands before the name of a command inside counts, too
        metavar="TIME",
        help=f"off a terminal, a line every so often (default: {duration_text(phases.EVERY)}), or {phases.NONE}",
    )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _add_progress(inner)


def _progress_interval(text: str) -> str:
    try:
        phases.interval(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}": {error}') from None
    return text
