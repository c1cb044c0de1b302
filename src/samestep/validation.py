"""From pydantic's errors to one line a mistake: where it is, what was given, what to use instead."""

import pathlib
import re
import typing
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from functools import wraps
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from samestep.errors import UserError, closest
from samestep.input_files import text_of
from samestep.synonyms import meaning_of, value_of
from samestep.variables import expanded_in, without_values
from samestep.yaml_loader import parse_yaml, yaml_mistake

Path = tuple[str, ...]
_T = TypeVar("_T")


# What to use instead, by pydantic's name of the mistake, in the words of somebody who writes YAML.
_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "number_wanted": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section of keys and values",
    "dataclass_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
}
_SHOULD = "; it should be "
_NULLS = ("none", "nil")  # words of other languages for YAML's null
_POWER = re.compile(r"\d{1,9}(?:\.\d{1,9})?[eE]\+?\d{1,2}", re.ASCII)  # a number with an exponent
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_OF_KEYS = ("unexpected_keyword_argument", "extra_forbidden", "invalid_key")

# Keys of other files, which people write into a job's.
_OF_SERVERS = "it is a setting of the parameter server; use engine: parameter-server and a file of its settings"
_ELSEWHERE: Mapping[str, str] = dict.fromkeys(
    ("staleness", "servers", "delay_compensation", "worker_restarts"), _OF_SERVERS
)


def explain(
    error: ValidationError,
    value: Any,
    schema: Any,
    *,
    prefix: Path = (),
    place: Callable[[Path], str] = lambda path: "",
) -> str:
    """One line for each mistake in `value`, which should have been a `schema`.

    `prefix` is where `value` stands in the job; `place` says which line of which file a path stands in.
    """
    kinds: dict[str, list[str]] = {}  # by what is said of the value; each kind that a value may be has its own say
    for detail in error.errors(include_url=False):
        path = _path_in(value, detail)
        names = keys_at(schema, path[:-1], value)
        sentence = _after_comma(detail, prefix, path, value) or _sentence(detail, prefix + path, names)
        if _WANTED.get(detail["type"]) == _WANTED["dict_type"] and isinstance(detail["input"], str):
            sentence += _example(detail["input"], _schemas_at(schema, path, value))
        subject, _, what = f"{place(prefix + path)}{sentence}".partition(_SHOULD)
        kinds.setdefault(subject, []).append(what)
        absent = detail["input"] is False or str(detail["input"]).lower() in _NULLS
        if what and absent and "null" not in what and _may_be_null(schema, path, value):
            kinds[subject].append("null for none")
    return "\n".join(
        subject + _SHOULD * any(what) + ", or ".join(dict.fromkeys(what)) for subject, what in kinds.items()
    )


def checked(schema: Any, values: Mapping[str, Any], *, prefix: Path = ()) -> Any:
    """A dataclass made from values. Raises UserError with a line for each mistake."""
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        raise UserError(explain(error, values, schema, prefix=prefix)) from None


def tells_mistakes(cls: type[_T]) -> type[_T]:
    """Class decorator of a dataclass that users build in Python: its constructor raises UserError, not pydantic's."""
    init = cls.__init__

    @wraps(init)
    def explained(self: _T, *positional: Any, **values: Any) -> None:
        if positional:
            raise UserError(f"{cls.__name__}({shown(positional[0])}): its fields are given by name, as NAME=VALUE")
        try:
            init(self, **values)
        except ValidationError as error:
            raise UserError(explain(error, values, cls, place=lambda path: f"{cls.__name__}: ")) from None

    cls.__init__ = explained  # pydantic keeps its own, which this one calls
    return cls


def checked_file(schema: Any, path: pathlib.Path, what: str) -> Any:
    """A dataclass made from a YAML file of `what`. Raises UserError that names the file and each mistake."""
    wrong = f"no YAML file of {what}"
    text = text_of(path, missing=f"{path}: {wrong}: no such file", expected="a file")
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(yaml_mistake(error, str(path), text, wrong)) from None
    if not isinstance(values, Mapping | None):
        raise UserError(f"{path}: {wrong}: it is {shown(values)}; write keys and values") from None
    try:
        return checked(schema, {} if values is None else values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def check_keys(section: Any, schema: Any, name: str) -> None:
    """Raise UserError for a key that a plain dataclass doesn't have; pydantic would pass over it in silence."""
    classes = _dataclasses(schema, section)
    if not isinstance(section, Mapping) or len(classes) != 1 or is_pydantic_dataclass(classes[0]):
        return
    hints = get_type_hints(classes[0], include_extras=True)
    names = [field.name for field in fields(classes[0]) if field.init]
    for key, value in section.items():
        if key not in names:
            raise UserError(f'unknown key "{name}.{key}"; {closest(str(key), names)}')
        check_keys(value, hints[key], f"{name}.{key}")


def _sentence(detail: Any, path: Path, names: Sequence[str]) -> str:
    """One of pydantic's errors as a sentence: the key, what is there, what it should be."""
    kind, context, name = detail["type"], detail.get("ctx", {}), ".".join(path)
    if kind in _OF_KEYS:
        instead = _ELSEWHERE.get(path[-1]) or _meant(name) or _in_ascii(path[-1], names)
        instead = instead or (closest(path[-1], names) if names else None)
        return f'unknown key "{name}"' + (f"; {instead}" if instead else "")
    if detail["loc"] and detail["loc"][-1] == "[key]":
        return f'{name}: the key {path[-1]} should be text; write it as "{path[-1]}"'
    if kind == "missing" and isinstance(detail["input"], Sequence):
        return f"{'.'.join(path[:-1])} is {shown(detail['input'])}; its item {int(path[-1]) + 1} is missing"
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{name} is missing"
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        tag = detail["input"].get(key) if isinstance(detail["input"], Mapping) else context["tag"]
        tags = context["expected_tags"].replace("'", "").split(", ")
        return f"{name}.{key} is {shown(tag)}; {closest(str(tag), tags)}"
    if kind == "union_tag_not_found":
        return f"{name}.{context['discriminator'].strip(chr(39))} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").removeprefix("Input ")
    if kind in ("value_error", "assertion_error", "broken_rule"):
        return f"{name}: {_as_written(message, detail['input'])}"
    if kind in ("too_short", "too_long"):
        limit = context.get("min_length", context.get("max_length"))
        message = f"should have {'at least' if kind == 'too_short' else 'at most'} {limit} items"
    elif kind in _WANTED:
        message = f"should be {_WANTED[kind]}{_written_so(kind, detail['input'])}"
    elif kind == "literal_error" and (value := value_of(detail["input"])) and f"'{value}'" in context["expected"]:
        return f"{name} is {shown(detail['input'])}; here it is {value}"
    return f"{name} is {shown(detail['input'])}; it {message}"


def _written_so(kind: str, value: Any) -> str:
    """How what is meant is written, where YAML takes it for something else; "" where that isn't known."""
    if isinstance(value, date) and kind in ("string_type", "path_type"):
        return f", in quotes: '{value}' is a date in YAML"
    if isinstance(value, bool) and kind == "string_type":
        return " (a word such as no or on stands in quotes)"
    if kind == "float_type" and isinstance(value, int):
        return " of fewer digits"
    if not isinstance(value, str) or kind not in ("int_parsing", "float_parsing", "number_wanted"):
        return ""
    number = _number_in(value)
    if number is None or (kind == "int_parsing" and not number.is_integer()):
        return ""
    return f", such as {int(number) if kind == 'int_parsing' else repr(number)}"


def _number_in(text: str) -> float | None:
    """The number in a text such as 1e2, 0o17, "0,5", full-width digits, or one with a dash in place of a minus."""
    plain = unicodedata.normalize("NFKC", text).strip()
    plain = re.sub("^[\u2010-\u2015\u2212]", "-", plain)
    if re.fullmatch(r"0o[0-7]{1,9}", plain):
        return float(int(plain, 8))
    if re.fullmatch(r"-?\d{1,9},\d{1,9}", plain, re.ASCII):
        plain = plain.replace(",", ".")
    return float(plain) if (plain != text and _NUMBER.fullmatch(plain)) or _POWER.fullmatch(plain) else None


def _index(part: str) -> int | None:
    """The number that a part of a path is; None for a name, digits of other scripts, and thousands of digits."""
    return int(part) if re.fullmatch(r"\d{1,18}", part, re.ASCII) else None


def _after_comma(detail: Any, prefix: Path, path: Path, value: Any) -> str | None:
    """What to say of the key 5 without a value that YAML makes of {lr: 1,5}; None for another mistake."""
    if detail["type"] not in _OF_KEYS or (key := _index(path[-1])) is None:
        return None
    section = value
    for part in path[:-1]:
        number = _index(part)
        if isinstance(section, list) and number is not None:
            section = section[number] if number < len(section) else None
        else:
            section = section.get(part) if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or section.get(key, section) is not None:
        return None
    name = ".".join((*prefix, *path))
    return f'unknown key "{name}"; a decimal number is written with a point, such as 0.{path[-1]}, not a comma'


def _in_ascii(key: str, keys: Sequence[str]) -> str | None:
    """What to do about a key of full-width letters, or with a space that isn't one; None for another key."""
    plain = unicodedata.normalize("NFKC", key).strip()
    odd = [character for character in key if not character.isascii() and (character.isspace() or plain in keys)]
    if not odd:
        return None
    return f"it has a {unicodedata.name(odd[0], 'character').lower()} ({ascii(odd[0])[1:-1]}) in it; write {plain}"


def _meant(name: str) -> str | None:
    """What a key is called here, if that of another tool, or one that stands in another section."""
    meaning = meaning_of(name.rpartition(".")[2])
    return meaning.as_key() if meaning is not None and meaning.key != name else None


def _as_written(message: str, value: Any) -> str:
    """A message of a check of our own, which may show what it was given, with ${NAME} in it."""
    return without_values(without_values(message, {str(text): text.written for text in expanded_in(value)}))


def shown(value: Any) -> str:
    """A value as it stands in a message: as YAML writes it, and never long."""
    words = {None: "empty", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = str(value) if isinstance(value, date) else without_values(repr(value))
    return text if len(text) < 80 else text[:77] + "..."


def _path_in(value: Any, detail: Any) -> Path:
    """pydantic's location without the tags of unions, which the user never wrote."""
    path: list[str] = []
    here = value
    location = detail["loc"]
    for index, part in enumerate(location):
        absent = detail["type"].startswith("missing") and index == len(location) - 1
        if isinstance(here, Mapping):
            # A key that is no text, such as null, stands as text in the location.
            if part not in here and not absent and part not in map(str, here):
                continue
            here = here.get(part)
        elif isinstance(here, Sequence) and not isinstance(here, str) and isinstance(part, int):
            here = here[part] if part < len(here) else None
        else:
            continue
        path.append(str(part))
    if detail["type"] == "broken_rule":
        path.append(detail["ctx"]["key"])
    return tuple(path)


def _example(word: str, schemas: Sequence[Any]) -> str:
    """An example of a section, for a word in place of one whose `name` or `kind` says which it is."""
    tags = [f for schema in schemas if is_dataclass(schema) for f in fields(schema) if f.name in TAGS]
    tags = [tag for tag in tags if isinstance(tag.default, str)]
    tag = next((tag for tag in tags if tag.default == word), tags[0] if tags else None)
    return "" if tag is None else f", such as {{{tag.name}: {tag.default}}}"


def keys_at(schema: Any, path: Path, value: Any) -> list[str]:
    """The keys that may stand at `path` below a dataclass."""
    here = _schemas_at(schema, path, value)
    return [field.name for field in fields(here[0])] if here and is_dataclass(here[0]) else []


def dotted_keys(schema: Any, prefix: Path = ()) -> Iterator[str]:
    """Every key that may stand below a dataclass, with those of the sections in it."""
    for name, hint in get_type_hints(schema, include_extras=True).items():
        yield ".".join((*prefix, name))
        for section in _dataclasses(hint, None):
            yield from dotted_keys(section, (*prefix, name))


def _may_be_null(schema: Any, path: Path, value: Any) -> bool:
    """Whether the key at `path` may be null."""
    sections = [section for section in _schemas_at(schema, path[:-1], value) if is_dataclass(section)]  # no lists
    hint = get_type_hints(sections[0], include_extras=True).get(path[-1]) if sections and path else None
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return type(None) in get_args(hint)


def _schemas_at(schema: Any, path: Path, top: Any) -> list[Any]:
    """The dataclasses that may stand at `path` below a dataclass."""
    here, value, item = _dataclasses(schema, top), top, None
    for part in path:
        if not here:
            return []
        if isinstance(value, Sequence) and (number := _index(part)) is not None:  # an item of a list of sections
            value = value[number]
            here = _dataclasses(item, value)
            continue
        value = value.get(part) if isinstance(value, Mapping) else None
        hint = get_type_hints(here[0], include_extras=True).get(part)
        here = _dataclasses(hint, value)
        if get_origin(hint) is tuple:
            item, here = get_args(hint)[0], here or [hint]
    return here


def _dataclasses(hint: Any, value: Any) -> list[Any]:
    """The dataclasses that a type hint may mean for this value; one alone where its `name` or `kind` says which."""
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    if get_origin(hint) is Annotated:
        return _dataclasses(get_args(hint)[0], value)
    if get_origin(hint) in (typing.Union, UnionType):
        classes = [cls for argument in get_args(hint) for cls in _dataclasses(argument, value)]
        tags = [value.get(key) for key in TAGS] if isinstance(value, Mapping) else [None, None]
        tagged = [cls for cls in classes if _tag_of(cls) in tags]
        others = [cls for cls in classes if _tag_of(cls) is MISSING]  # those that take any name
        return tagged or (others if tags != [None, None] else classes) or classes
    return []


# The keys that say which of several sections one is.
TAGS = ("name", "kind")


def _tag_of(schema: Any) -> Any:
    return next((f.default for f in fields(schema) if f.name in TAGS), None)
