"""Reads other tools' configuration files: DeepSpeed's JSON and Accelerate's YAML, for engines and for translations.

Each mistake has one message here: no such file, not UTF-8, neither JSON nor YAML, a key that stands twice, a value
where a section of keys is wanted. What the keys mean stands in `deepspeed.keys` and in `accelerate_keys`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import UserError
from samestep.input_files import parse_json, text_of
from samestep.validation import shown
from samestep.yaml_loader import NO_TEXT, parse_yaml, yaml_mistake

# How DeepSpeed and Accelerate take true and false, also in quotes.
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


class NotJsonError(UserError):
    """A text that is not JSON; it may still be of another format."""


def config_text(file: Path, *, hint: str = "") -> str:
    """The text of a configuration file. Raises UserError if it can't be read, with a hint where it is missing."""
    return text_of(file, missing=f"no file {file}{hint}", expected="the path of a file")


def json_section(file: Path) -> dict[str, Any]:
    """The keys and values of a JSON file. Raises UserError for a file that is none."""
    return _section(file, json_of)


def yaml_section(file: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises UserError for a file that is none."""
    return _section(file, yaml_of)


def _section(file: Path, parse: Callable[[str, str], Any]) -> dict[str, Any]:
    text = config_text(file)
    if not text.strip():
        raise UserError(f"{file} is empty")
    value = parse(str(file), text)
    check_section(value, f"{file}: the file")
    return value


def check_section(value: Any, place: str) -> None:
    """Raise UserError for a value that has no keys."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place} is {shown(value)}; it should be a section of keys and values")


def json_of(name: str, text: str) -> Any:
    """The value of a text in JSON, also with comments and with a comma after the last value, as DeepSpeed takes it.

    Raises NotJsonError, or UserError for a key that stands twice, which DeepSpeed refuses too.
    """
    try:
        return _json(name, text)
    except json.JSONDecodeError as error:
        plain = _LAST_COMMA.sub(lambda match: match[1] or "", without_comments(text))
        try:
            return _json(name, plain)
        except json.JSONDecodeError:
            raise NotJsonError(f"{name}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None


def _json(name: str, text: str) -> Any:
    value = parse_json(text, object_pairs_hook=lambda pairs: unique(name, pairs))
    refuse_no_texts(name, value)
    return value


def refuse_no_texts(name: str, value: Any) -> None:
    """Raise UserError for a text inside a value that no file can hold: escapes in JSON and Python write such."""
    if isinstance(value, str) and (wrong := NO_TEXT.search(value)):
        raise UserError(f"{name}: character {ord(wrong[0]):#x} can't stand in a text")
    inner = [*value, *value.values()] if isinstance(value, Mapping) else value
    if isinstance(inner, (list, tuple, set)):
        for nested in inner:
            refuse_no_texts(name, nested)


def without_comments(text: str) -> str:
    """The text without `// ...`, `# ...` and `/* ... */`, where these don't stand in a string."""
    return _COMMENT.sub(lambda match: match[1] or "", text)


def unique(name: str, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A section of these keys and values. Raises UserError for a key that stands twice."""
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f"{name}: key {shown(key)} stands twice; keep one of them")
        values[key] = value
    return values


def yaml_of(name: str, text: str) -> Any:
    """The sections or the list of a text in YAML. A text that isn't YAML, or is just words, is returned unchanged."""
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        first = text.lstrip().partition("\n")[0]
        if isinstance(error, yaml.MarkedYAMLError) and ":" not in first:  # a command, not YAML
            return text
        raise UserError(yaml_mistake(error, name, text)) from None
    return value if isinstance(value, (dict, list)) else text


def switch_of(value: Any) -> bool | None:
    """True or false, also as a word or a number; None for any other value."""
    return _SWITCHES.get(str(value).lower())
