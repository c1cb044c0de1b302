"""Inputs that nobody would write: mutations of valid ones, and what a command or a reader does with them.

Everything that a user can hand over has a kind here. `tests/test_fuzz.py` tries so many of each; an exception other
than those that the command line turns into one message is a fault, and so is an input that takes over ten seconds of
the processor, or a hundred by the clock, in which it waits for something.
"""

import contextlib
import copy
import io
import json
import random
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.cli.main import main

LIMIT = 10.0  # seconds of the processor, whatever else runs on the machine
HANGS = 10 * LIMIT  # seconds by the clock

# Words that have a meaning to some reader, or none to any.
WORDS = (
    "", " ", "\t", "\n", "\r\n", ":", ": ", "- ", "#", "{", "}", "[", "]", ",", "'", '"', "&a ", "*a", "!!bool ",
    "!!int x", "!!python/object:os.system ", "!!set {a}", "!!binary x", "!!timestamp x", "!!omap [a]", "<<: ", "? ",
    "|", ">", "---\n", "...\n", "%YAML 9.9\n", "\ufeff", "\x00", "\x07", "\x85", "\u2028", "\ud800", "é", "🦆", "=",
    "null", "~", "true", "no", "on", "nan", ".nan", ".inf", "-.inf", "inf", "1e400", "-1", "0", "1:30", "010", "0x1f",
    "1_000", "1__0", "9" * 20, "9" * 400, "9" * 5000, "-0.0", "1e-400", "0.5", "2020-13-01", "2020-01-01", "a" * 300,
    "../..", "/proc/self/mem", "/dev/zero", "/dev/stdin", "${HOME}", "${NOTHING}", "\\", "\\x00", "%s", "{0}", "*",
    "dp2", "tp2", "pp2", "fsdp", "zero1x", "recompute=full", "order=", "stages=9", "x" * 5000, "[" * 300, "{" * 300,
    "auto", "cpu", "samestep", "--", "-", "rank", "slots=", "@", ";", "(x", ")", "[1-", "[01-99999999]", "1(x999999)",
)  # fmt: skip

VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 10**12, 10**30, 10**400, 0.5, -0.5, 1.0, 1e-9, 1e30, float("inf"),
    float("nan"), "", "x", "1", "nan", "auto", "x" * 300, "a\x00b", [], [1], [None], ["x"] * 20, [[1]], {}, {"x": 1},
    {"a": {"b": [1, {"c": None}]}}, "dp2", "single", "../..", "/dev/zero", "/proc/self/mem", "${NOTHING}",
)  # fmt: skip


class TookTooLongError(BaseException):
    """An input took longer than the limit. No `except Exception` of what is tried hides it."""


# Timers: of what this process computes, with what the system does for it, and of the clock.
_TIMERS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}


@contextlib.contextmanager
def limited(seconds: float = LIMIT, hangs: float = HANGS) -> Iterator[None]:
    """Raise TookTooLongError after so many seconds of the processor, or so many by the clock."""

    def late(number: int, _: object) -> None:
        raise TookTooLongError(signal.Signals(number).name)

    before = {number: signal.signal(number, late) for number in _TIMERS.values()}
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, hangs)
        yield
    finally:
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def command(words: Sequence[str]) -> str:
    """Run a command in this process. Raises what it raises, AssertionError for a message that is none."""
    out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    given = sys.stdin
    sys.stdin = io.StringIO("")
    try:
        with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = main(words)
            except SystemExit as ended:  # --help and --version
                code = ended.code
    finally:
        sys.stdin = given
    told = errors.getvalue()
    assert code in (0, 1, 2), code
    assert code != 2 or re.search("^samestep: ", told, re.MULTILINE), told
    assert "Traceback" not in told, told
    assert len(told) < 60_000, f"{len(told)} characters"
    return told


def text_of(chance: random.Random, text: str) -> str:
    """A text with one to four small changes."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((0, 0, 1, 3, 12, 60)))
        kind = chance.randrange(6)
        if kind <= 2:
            text = text[:start] + chance.choice(WORDS) * chance.choice((1, 1, 1, 2, 9)) + text[end:]
        elif kind == 3:
            text = text[:start] + text[end:]
        elif kind == 4:  # again elsewhere
            place = chance.randrange(len(text) + 1)
            text = text[:place] + text[start:end] + text[place:]
        else:
            lines = text.splitlines(keepends=True)
            chance.shuffle(lines)
            text = "".join(lines) if chance.random() < 0.3 else text[:start]
    return text


def bytes_of(chance: random.Random, content: bytes) -> bytes:
    """Bytes with a few of them changed, cut off, or in another encoding."""
    kind = chance.randrange(5)
    if kind == 0:
        return content.decode("utf-8", "replace").encode(chance.choice(("utf-16", "utf-32", "latin-1")), "replace")
    if kind == 1:
        return content[: chance.randrange(len(content) + 1)]
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def written(chance: random.Random, file: Path, text: str) -> Path:
    """A file with a changed text, or with changed bytes."""
    content = text_of(chance, text).encode("utf-8", "surrogatepass")
    file.write_bytes(bytes_of(chance, content) if chance.random() < 0.15 else content)
    return file


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places_in(each, (*path, key))


def structure_of(chance: random.Random, value: Any) -> Any:
    """A value with one to three of those inside replaced, removed, renamed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        places = list(places_in(value))
        if not places:
            return chance.choice(VALUES)
        *path, last = chance.choice(places)
        here = value
        for key in path:
            here = here[key]
        kind = chance.randrange(5)
        if kind <= 2:
            here[last] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 3:
            del here[last]
        elif isinstance(here, dict):
            here[chance.choice((*WORDS, str(last).upper(), f"{last}_"))] = here[last]
        else:
            here.append(here[last])
    return value


def json_of(chance: random.Random, value: Any) -> str:
    """A changed value as JSON, whose text may be changed too."""
    text = json.dumps(structure_of(chance, value), default=str, indent=chance.choice((None, 1)))
    return text_of(chance, text) if chance.random() < 0.3 else text


def mapping_of(chance: random.Random, values: Mapping[str, str]) -> dict[str, str]:
    """Variables of which some are changed, gone, or empty. None has NUL, which no environment has."""
    changed = dict(values)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(list(changed) or ["RANK"])
        kind = chance.randrange(4)
        if kind == 0:
            changed.pop(name, None)
        elif kind == 1:
            changed[name] = chance.choice(WORDS)
        else:
            changed[name] = text_of(chance, changed.get(name, ""))
    return {name: value.replace("\0", "") for name, value in changed.items()}
