"""What can go wrong, in two kinds: the user's mistake (no traceback) and a rank's failure (its traceback).

Below the exceptions are the parts of a message: the place in the user's code, the closest known word, and a sentence
for the error that PyTorch raises where a label or an id is out of range.
"""

import difflib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PACKAGES = {"site-packages", "dist-packages"}


def printable(text: str, most: int | None = None) -> str:
    """Escape what moves a terminal's cursor or colours it, but line breaks and tabs; cut a text longer than `most`.

    Names and values in messages come from files that anybody may have written.
    """
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)
    return text if most is None or len(text) <= most else f"{text[: most - 3]}..."


class UserError(Exception):
    """A mistake in what the user gave: one message that names the value, the place and what to use instead.

    The command line prints the message alone and exits with 2.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


USERS_MISTAKE = 2  # the exit code of a UserError, also that of argparse


class LayoutError(UserError):
    """A layout that can't be read, doesn't fit the processes, the model or the batch, or isn't there yet."""

    on_every_rank = True  # False: one rank may have raised it while the others wait for that rank


class CheckpointError(UserError):
    """A checkpoint that can't be written or read: what is wrong with which file, and what to use instead."""


class RankFailedError(Exception):
    """A rank failed while the job ran: the first failing rank, and its traceback or the signal that ended it.

    The command line prints it once and exits with 1.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed first:\n{reason.rstrip()}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type["RankFailedError"], tuple[int, str]]:
        return type(self), (self.rank, self.reason)


class InternalError(Exception):
    """samestep itself failed: where, and what to report. It is no refusal, and comes with its traceback."""


class HostLostError(Exception):
    """A multi-host job that can't go on here: which host or store was lost, and what to use instead.

    The command line prints it and exits with 1.
    """


class JobOverError(HostLostError):
    """A host joins a job that the other hosts have finished."""


class NotSavedError(Exception):
    """What a training has made can't be kept: which file, why, and what is lost.

    The command line prints it and exits with 1: a failure, after which a scheduler may start the job again.
    `at_end`: all steps are taken, so that a restart of the ranks would take the last of them for nothing.
    """

    def __init__(self, message: str, at_end: bool = False) -> None:
        super().__init__(message)
        self.at_end = at_end

    def __reduce__(self) -> tuple[type["NotSavedError"], tuple[str, bool]]:
        return type(self), (str(self), self.at_end)


class InterruptedJobError(Exception):
    """The user or the scheduler stopped the job by a signal; the exit code is 128 + the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number

    def __reduce__(self) -> tuple[type["InterruptedJobError"], tuple[int]]:
        return type(self), (self.signal_number,)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 128 and the signal's number."""
        return 128 + self.signal_number


class NonFiniteError(Exception):
    """A step's loss or gradient norm is NaN or infinite: the step, and the file that holds its samples' indices.

    The command line prints it and exits with 1.
    """

    def __init__(self, step: int, values: str, samples: str, file: str) -> None:
        super().__init__(f"step {step}: {values}, which is not finite; the batch's samples: {samples} ({file})")
        self.step = step
        self.values = values
        self.samples = samples
        self.file = file

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[int, str, str, str]]:
        return type(self), (self.step, self.values, self.samples, self.file)


class StartError(Exception):
    """The hosts of a job can't start together: one is not reached, does not join, or is lost.

    The command line prints it and exits with 1.
    """


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def described(error: BaseException) -> str:
    """Describe an error in one line: its type, its message, and the line of the user's code that led to it."""
    place = place_of(error)
    return f"{type(error).__name__}: {one_line(error)}" + (f", at {place}" if place else "")


def ended_by_code(end: BaseException, what: str) -> str:
    """Tell in one line that the user's code ended `what` by sys.exit() or KeyboardInterrupt, which are no errors."""
    how = f"called sys.exit({end.code})" if isinstance(end, SystemExit) else f"raised {type(end).__name__}"
    place = place_of(end)
    return f"{what} {how} before its end" + (f", at {place}" if place else "") + "; raise an error that says why"


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's code in an error's traceback, as file:line.

    Where there is none, that of an installed package other than PyTorch, such as a model of transformers.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _written(next(_lines(reversed(frames)), None))


def place_here() -> str | None:
    """Return the innermost running line of the user's code, else of an installed package, as file:line."""
    return _written(next(_lines(_running()), None))


def users_line_here() -> tuple[str, int] | None:
    """Return file and line of the innermost line that is running now and is of no installed package."""
    return next(_lines(_running(), installed=False), None)


# What Python raises where code is wrong. PyTorch's operators raise RuntimeError for tensors that don't fit.
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
_PASSES_ON = {"__torch_function__", "__torch_dispatch__"}


def internal_line(error: BaseException) -> str | None:
    """The line of samestep's own code that is wrong, as parallel/trace.py:31; None if an error is not samestep's.

    It is if a line of samestep's raised it, other than one that passes on a call of the model's to PyTorch.
    """
    own, frames = Path(__file__).parent, traceback.extract_tb(error.__traceback__)
    if not isinstance(error, _BUGS) or not frames or not Path(frames[-1].filename).is_relative_to(own):
        return None
    for frame in reversed(frames):
        if not Path(frame.filename).is_relative_to(own):
            break
        if frame.name in _PASSES_ON:
            return None
    return f"{Path(frames[-1].filename).relative_to(own)}:{frames[-1].lineno}"


def _running() -> Iterator[tuple[str, int]]:
    """Yield file and line of each running call, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _lines(frames: Iterable[tuple[str, int]], *, installed: bool = True) -> Iterator[tuple[str, int]]:
    """Yield file, as messages show it, and line of the user's frames, then of installed packages other than PyTorch.

    `frames`: the innermost first. `installed`: False for the user's alone.
    """
    own, standard = Path(__file__).parent, Path(sysconfig.get_path("stdlib"))
    others: list[tuple[Path, int]] = []
    for name, line in frames:
        file = Path(name)
        if file.is_relative_to(own):
            continue
        if _PACKAGES & set(file.parts):
            others.append((file, line))
        elif not file.is_relative_to(standard) and (file.suffix == ".py" or file.is_file()):  # not <string>
            yield shown(file.resolve()), line
    if installed:
        yield from ((shown(file.resolve()), line) for file, line in others if "torch" not in file.parts)


def _written(place: tuple[str, int] | None) -> str | None:
    return None if place is None else f"{place[0]}:{place[1]}"


def shown(file: Path) -> str:
    """Format a file for messages: relative to the current folder if it lies in there."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def closest(word: str, candidates: Iterable[str]) -> str:
    """Suggest known words for an unknown one: the closest one first, then all."""
    names = sorted(candidates)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f"{hint}known: {', '.join(names) or 'nothing'}"


# What PyTorch's operators say on a CPU: an embedding, a cross-entropy, indexing, gather and scatter, one_hot.
_OUT_OF_RANGE = re.compile(
    r"out of range in self|is out of bounds|index out of range|Class values must be|"
    r"out of bounds for dimension|indices should be"
)

_SHOWN = 8  # samples that a message names


@contextmanager
def index_errors_explained(what: str, samples_of: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
    """Convert PyTorch's error for a label or an id out of range into a UserError.

    `what` names the code that ran; `samples_of` returns the data set's indices of its samples.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not _OUT_OF_RANGE.search(str(error)) or _of_a_list(error):
            raise
        samples = samples_of()
        numbers = ", ".join(str(number) for number in samples[:_SHOWN]) + (", ..." if len(samples) > _SHOWN else "")
        of = f", samples {numbers}" if samples else ""
        place = place_of(error)
        raise UserError(
            f"{what}{of}: a label or an id is out of range ({one_line(error)}){f', at {place}' if place else ''}; "
            "use labels and ids from 0 to the model's number of classes or embeddings less 1"
        ) from error


def _of_a_list(error: BaseException) -> bool:
    """Whether Python's own sequences raised an IndexError: a bug in code, which needs its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    by_python = re.match(r"(list|tuple|string|range object|pop|deque|bytearray) ", str(error)) is not None
    return by_python and "torch" not in Path(last.filename).parts
