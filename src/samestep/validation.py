"""From pydantic's errors to one line a mistake: where it is, what was given, what would do."""

import difflib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import ValidationError

Path = tuple[str, ...]


def explain(
    error: ValidationError,
    given: Any,
    schema: Any,
    *,
    prefix: Path = (),
    place: Callable[[Path], str] = lambda path: "",
) -> str:
    """One line for each mistake in `given`, which should have been a `schema`.

    `prefix` is where `given` stands in the job; `place` says which line of which file a path stands in.
    """
    lines = []
    for detail in error.errors(include_url=False):
        path = _path_in(given, detail["loc"])
        name = ".".join(prefix + path)
        lines.append(f"{place(prefix + path)}{_sentence(detail, name, path, given, schema)}")
    return "\n".join(dict.fromkeys(lines))


def closest(word: str, known: Iterable[str]) -> str:
    """What would do instead of an unknown word: the closest one first, then all."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f"{hint}known: {', '.join(names) or 'nothing'}"


def _sentence(detail: Any, name: str, path: Path, given: Any, schema: Any) -> str:
    kind = detail["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f'unknown key "{name}"; {closest(path[-1], _keys_at(schema, path[:-1], given))}'
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{name} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "union_tag_invalid":
        tags = detail["ctx"]["expected_tags"].replace("'", "")
        return f'{name}.name is "{detail["ctx"]["tag"]}"; it can be {tags}'
    if kind in ("value_error", "assertion_error"):
        return f"{name}: {message}"
    shown = repr(detail["input"])
    return f"{name} is {shown if len(shown) < 80 else shown[:77] + '...'}; it {message}"


def _path_in(given: Any, location: Sequence[int | str]) -> Path:
    """pydantic's location without the tags of unions, which the user never wrote."""
    path: list[str] = []
    here = given
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(here, Mapping):
            tag = part == here.get("name", "adamw") and part not in here
            if tag and not last:
                continue
            here = here.get(part)
        elif isinstance(here, Sequence) and not isinstance(here, str) and isinstance(part, int):
            here = here[part] if part < len(here) else None
        elif not last:
            here = None
        path.append(str(part))
    return tuple(path)


def _keys_at(schema: Any, path: Path, given: Any) -> list[str]:
    """The keys that may stand at `path` below a dataclass."""
    here, value = _dataclass_of(schema, given), given
    for part in path:
        if here is None:
            return []
        value = value.get(part) if isinstance(value, Mapping) else None
        here = _dataclass_of(get_type_hints(here, include_extras=True).get(part), value)
    return [field.name for field in fields(here)] if here is not None else []


def _dataclass_of(hint: Any, value: Any) -> Any:
    """The dataclass that a type hint means for this value; None if it means none."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    if get_origin(hint) is Annotated:
        return _dataclass_of(get_args(hint)[0], value)
    if get_origin(hint) in (typing.Union, type(int | str)):
        found = [cls for cls in (_dataclass_of(arg, value) for arg in get_args(hint)) if cls is not None]
        wanted = value.get("name") if isinstance(value, Mapping) else None
        named = [cls for cls in found if any(f.name == "name" and f.default == wanted for f in fields(cls))]
        return (named or found or [None])[0]
    return None
