"""Job files: YAML to a Job and back, with the line or the flag that each value came from."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from samestep.errors import UserError
from samestep.job import Job
from samestep.validation import closest, explain

Keys = tuple[str, ...]


class LoadedJob:
    """A job, the file it was read from, and where each of its values came from."""

    def __init__(self, job: Job, file: Path, sources: Mapping[Keys, str]) -> None:
        self.job = job
        self.file = file
        self.sources = dict(sources)


def load(file: Path, overrides: Sequence[tuple[str, str, str]] = ()) -> LoadedJob:
    """Read a job file and lay overrides (dotted key, YAML value, source) over it.

    Raises UserError that names the file, the line and the key of each mistake.
    """
    values, sources = _read(file)
    for key, text, source in overrides:
        _override(values, sources, key, text, source)

    def place(path: Keys) -> str:
        while path and path not in sources:
            path = path[:-1]
        return f"{sources.get(path, str(file))}: "

    try:
        job = TypeAdapter(Job).validate_python(values)
    except ValidationError as error:
        raise UserError(explain(error, values, Job, place=place)) from None
    return LoadedJob(_resolve_paths(job, file), file, sources)


def dump(loaded: LoadedJob) -> str:
    """The whole job as YAML, every value followed by a comment that says where it came from."""
    lines: list[tuple[str, str]] = []
    _dump(_plain(loaded.job), (), loaded.sources, lines)
    width = min(48, max(len(line) for line, _ in lines))
    return "\n".join(f"{line:<{width}}  # {source}" if source else line for line, source in lines)


def _read(file: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no job file {file}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; a job file is wanted") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from None
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{file}{at}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a job file; it must have a recipe: section")
    sources: dict[Keys, str] = {}
    _find_lines(node, (), file, sources)
    return values, sources


def _find_lines(node: yaml.Node | None, path: Keys, file: Path, sources: dict[Keys, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        line = f"{file}:{key.start_mark.line + 1}"
        if here in sources:
            raise UserError(f'{line}: key "{".".join(here)}" stands twice, first in {sources[here]}')
        sources[here] = line
        _find_lines(value, here, file, sources)


def _override(values: dict[str, Any], sources: dict[Keys, str], key: str, text: str, source: str) -> None:
    path = tuple(key.split("."))
    if len(path) < 2 or path[0] not in ("recipe", "run"):
        raise UserError(f'{source}: "{key}" must start with recipe. or run., such as recipe.optimizer.lr')
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    here = values
    for part in path[:-1]:
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f'{source}: "{part}" in "{key}" is {inner!r}, not a section; {closest(part, here)}')
        here = inner
    if isinstance(value, dict) and isinstance(here.get(path[-1]), dict):
        here[path[-1]] = {**here[path[-1]], **value}
    else:
        here[path[-1]] = value
    for deeper in [known for known in sources if known[: len(path)] == path and known != path]:
        if not isinstance(value, dict) or deeper[len(path)] in value:
            del sources[deeper]
    sources[path] = source
    if isinstance(value, dict):
        sources |= {(*path, str(name)): source for name in value}


# Keys of shipped tasks that name a file or a folder.
_PATH_KEYS = ("source", "eval_source", "folder", "tokenizer")


def _resolve_paths(job: Job, file: Path) -> Job:
    """Turn relative paths that exist beside the job file into absolute ones.

    A path is looked for beside the job file, then in the current folder (where it is left as it is).
    """
    recipe = job.recipe
    base = file.resolve().parent

    def beside(text: Any) -> Any:
        if not isinstance(text, str) or Path(text).is_absolute():
            return text
        path, colon, rest = text.partition(".py:")
        candidate = base / (path + (".py" if colon else ""))
        if not candidate.exists() or not re.search(r"[./]", text):
            return text
        return str(candidate) + (":" + rest if colon else "")

    task = beside(recipe.task)
    data = {key: beside(value) if key in _PATH_KEYS else value for key, value in recipe.data.items()}
    model = {key: beside(value) if key in _PATH_KEYS else value for key, value in recipe.model.items()}
    return replace(job, recipe=replace(recipe, task=task, data=data, model=model))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _dump(
    values: Mapping[Hashable, Any], path: Keys, sources: Mapping[Keys, str], lines: list[tuple[str, str]]
) -> None:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, str(key))
        if isinstance(value, dict) and value:
            lines.append((f"{indent}{key}:", ""))
            _dump(value, here, sources, lines)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
            lines.append((f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}", _source(here, sources)))


def _source(path: Keys, sources: Mapping[Keys, str]) -> str:
    """A value's own source, or that of the section in which it was given whole."""
    return sources.get(path, "default")
