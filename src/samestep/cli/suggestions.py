"""What a mistyped command or option may have meant: the nearest one of the command, or what it is called here."""

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence

from samestep.synonyms import COMMANDS, meaning_of, plain


def unknown_command(word: str, parser: argparse.ArgumentParser, commands: Sequence[str]) -> str:
    """The message for a word in place of a command."""
    hint = COMMANDS.get(word.lower()) if parser.prog == "samestep" else None
    near = difflib.get_close_matches(word.lower(), commands, n=1)
    if hint is not None:
        hint = f"samestep {hint} does that; "
    elif near:
        hint = f'did you mean "{near[0]}"? '
    return f'{parser.prog} has no command "{word}"; {hint or ""}there are {", ".join(commands)}'


def unknown_option(word: str, parser: argparse.ArgumentParser, root: argparse.ArgumentParser) -> str:
    """The message for an option that a command lacks; `parser` is the command's, `root` that of all."""
    word = word.partition("=")[0]
    message = f"{parser.prog} has no option {word}; "
    own = [flag for flag in _flags(parser) if flag.startswith("--")]
    if (instead := _instead(word, own, parser)) is not None:
        return message + instead
    others = {name: flags for name, flags in _commands(root) if word in flags}
    if others:
        return f"{message}it is one of {' and '.join(others)}; `{parser.prog} --help` lists its own"
    return f"{message}`{parser.prog} --help` lists those that it has"


def _instead(word: str, own: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """What to write in place of an option: with dashes, what it is called here, a job's key, or the nearest."""
    by_name = {plain(flag): flag for flag in own}
    if plain(word) in by_name:
        return f"use {by_name[plain(word)]}"
    if (meaning := meaning_of(word)) is not None:
        flag = next((flag for flag in meaning.options if flag in own), None)
        note = f", {meaning.note}" if meaning.note else ""
        if flag is not None:
            return f"here it is {flag}" + (note if "--set" in own else "")  # the note is of the job's key
        if meaning.key is not None and "--set" in own and "." in meaning.key:
            return f"use --set {meaning.key}=VALUE{note}"
        if parser.prog == "samestep launch" and meaning.key is not None:
            return f"options of the program stand behind it: samestep launch -- train.py {word} VALUE"
        if meaning.key is None and not meaning.options:
            return meaning.note
    elif "--set" in own and word.lstrip("-").startswith(("recipe.", "run.")):
        return f"use --set {word.lstrip('-')}=VALUE"
    if near := _near(word, own):
        return f"did you mean {near}? `{parser.prog} --help` lists those that it has"
    return None


def _near(word: str, own: Sequence[str]) -> str | None:
    """The options that begin with a word, as --dry-run does with --dry, else the one that looks most like it.

    Where the first letter differs, the rest must be nearly the same: --dry is no --ray.
    """
    begun = [flag for flag in own if flag.startswith(f"{word}-")]
    if begun and word.startswith("--"):
        return " or ".join(begun)
    for cutoff, near in ((0.7, [flag for flag in own if flag[:3] == word[:3]]), (0.8, own)):
        if close := difflib.get_close_matches(word, near, n=1, cutoff=cutoff):
            return close[0]
    return None


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return list(parser._option_string_actions)


def subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Each command below a parser, with its options."""
    for subparser in subparsers(parser).values():
        yield subparser.prog, _flags(subparser)
        yield from _commands(subparser)
