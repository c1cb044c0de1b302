"""Job files: YAML to a Job and back, with the line or the flag that each value came from."""

import difflib
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from samestep import environment
from samestep.errors import UserError
from samestep.input_files import text_of
from samestep.job import Job
from samestep.plausibility import implausible
from samestep.recipe import NamedOptimizer
from samestep.synonyms import meaning_of
from samestep.validation import TAGS, dotted_keys, explain, keys_at, shown
from samestep.variables import NAMED, Expanded, held, hide_from_messages, without_values
from samestep.yaml_loader import MERGE, DuplicateKeyError, RefusedError, YamlLoader, parse_yaml, yaml_mistake

Keys = tuple[str, ...]


class LoadedJob:
    """A job, the file it was read from, and the source of each value."""

    def __init__(self, job: Job, file: Path, sources: Mapping[Keys, str], remarks: Sequence[str] = ()) -> None:
        self.job = job
        self.file = file
        self.sources = dict(sources)
        self.remarks = tuple(remarks)  # on values of the file that an override left out


def load(file: Path, overrides: Sequence[tuple[str, str, str]] = ()) -> LoadedJob:
    """Read a job file and lay overrides (dotted key, YAML value, source) over it.

    Raises UserError that names the file, the line and the key of each mistake.
    """
    values, sources = _read(file)
    of_file = dict(sources)
    switched: list[str] = []
    for key, text, source in overrides:
        path, value = _parsed(key, text, source)
        switched += _leave_out(values, sources, of_file, path, value, source)
        _override(values, sources, path, value, source)

    def place(path: Keys) -> str:
        """Return the source of a value for a message: its own line, or that of the section around it."""
        while path and path not in sources:
            path = path[:-1]
        return f"{sources.get(path, str(file))}: "

    environ = environment.snapshot()
    values = _with_variables(values, (), environ, place)
    hide_from_messages(held(values, environ))
    try:
        job = TypeAdapter(Job).validate_python(values)
    except ValidationError as error:
        raise UserError(explain(error, values, Job, place=place)) from None
    for path, what in implausible(job):
        raise UserError(f"{place(path)}{'.'.join(path)} {what}")
    if job.name is None:
        job = _named(job, file.stem)
        sources[("name",)] = "the file's name"
    return LoadedJob(_as_written(_resolve_paths(job, file), values), file, sources, switched)


def _with_variables(value: Any, path: Keys, environ: Mapping[str, str], place: Callable[[Keys], str]) -> Any:
    """Replace ${NAME} in a value's texts by environment variables. Raises UserError for unset ones."""
    if isinstance(value, dict):
        return {key: _with_variables(inner, (*path, str(key)), environ, place) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_variables(inner, (*path, str(index)), environ, place) for index, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name in NAMED.findall(value):
        if name not in environ:
            raise UserError(
                f"{place(path)}{'.'.join(path)} is {shown(value)}, and the environment variable {name} is not set; "
                "set it, or write the value itself"
            )
    expanded = NAMED.sub(lambda match: environ[match[1]], value)
    return value if expanded == value else Expanded(expanded, value)


def _as_written(checked: Any, content: Any) -> Any:
    """What the checks made of a job's values, with texts again as `Expanded`, which they make plain.

    Dataclasses are changed in place: another one would be checked again.
    """
    if isinstance(content, Expanded):
        return Expanded(checked, content.written) if type(checked) is str else checked
    if isinstance(content, list) and isinstance(checked, tuple) and len(content) == len(checked):
        return type(checked)(map(_as_written, checked, content))
    if isinstance(content, list) and isinstance(checked, list) and len(content) == len(checked):
        return [*map(_as_written, checked, content)]
    if isinstance(content, dict) and isinstance(checked, dict):
        return {key: _as_written(value, content.get(key)) for key, value in checked.items()}
    if isinstance(content, dict) and is_dataclass(checked):
        for field in fields(checked):
            value = getattr(checked, field.name)
            if (written := _as_written(value, content.get(field.name))) is not value:
                object.__setattr__(checked, field.name, written)
    return checked


def _named(job: Job, name: str) -> Job:
    """The job with a file's name, or "job" where no run's folder can be called so."""
    try:
        return replace(job, name=name)
    except UserError:
        return replace(job, name="job")


def dump(loaded: LoadedJob, *, written: bool = False) -> str:
    """Format the whole job as YAML, with each value's source as a comment.

    `written`: to be shown; texts keep `${NAME}` as in the job file.
    """
    lines: list[tuple[str, str]] = []
    _dump(plain(loaded.job, written=written), (), loaded.sources, lines)
    width = min(48, max(len(line) for line, _ in lines))
    return "\n".join(f"{line:<{width}}  # {source}" if source else line for line, source in lines)


def to_run(job: Job) -> str:
    """Format a job as YAML for a run on this machine.

    Texts keep `${NAME}` as in the job file, since the variables may hold secrets; the run expands them again.
    """
    values = _reexpanded(plain(job), plain(job, written=True), environment.snapshot())
    return yaml.dump(values, Dumper=_Writer, allow_unicode=True, sort_keys=False, width=sys.maxsize)


def _reexpanded(value: Any, written: Any, environ: Mapping[str, str]) -> Any:
    """The written form of each text in `value` that the run's variables make the same text again."""
    if isinstance(value, dict):
        return {key: _reexpanded(inner, written[key], environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [_reexpanded(*both, environ) for both in zip(value, written, strict=True)]
    if not isinstance(value, str):
        return value
    return written if NAMED.sub(lambda name: environ.get(name[1], ""), written) == value else value


# What other files that are taken for a job file are, and what to do with them.
_OTHER_FILES = {
    ".py": "a Python script; samestep launch -- {file} starts it as ranks, samestep verify --script {file} proves "
    "its step, and samestep init writes a job file to start from",
    ".ipynb": "a notebook; write its task into a .py file, which a job file names by recipe.task: FILE.py:ClassName",
    ".toml": "TOML, and job files are YAML; write key: value, with two spaces before each key of a section",
    ".ini": "an INI file, and job files are YAML; write key: value, with two spaces before each key of a section",
    ".sh": "a script of the shell; samestep translate reads a torchrun command, and samestep launch starts a program",
}


def _read(file: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Parse a job file; return its values, and the line of each. Raises UserError with file and line."""
    if (what := _OTHER_FILES.get(file.suffix.lower())) is not None:
        raise UserError(f"a job file is wanted, and {file} is {what.format(file=file)}")
    text = text_of(file, missing=f"no job file {file}{_like(file)}", expected=f"a job file{_job_in(file)}")
    sources: dict[Keys, str] = {}
    try:
        reader = YamlLoader(text)
        node = reader.get_single_node()
        _find_lines(reader, node, (), file, sources)
        values = reader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise UserError(yaml_mistake(error, str(file), text)) from None
    if node is None or values is None:
        raise UserError(f"{file} is empty; a job file has a recipe: section")
    if not isinstance(values, dict):
        raise UserError(f"{file}:{node.start_mark.line + 1}: not a job file; it must have a recipe: section")
    if file.suffix.lower() == ".json" and "recipe" not in values:
        raise UserError(
            f"{file} has no recipe, so it is no job file; samestep translate {file} makes one of another tool's "
            "configuration"
        )
    return _by_themselves(values), sources


def _job_in(folder: Path) -> str:
    """A job file of a folder that was named in its place, for a message."""
    try:
        jobs = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    except (OSError, ValueError):
        return ""
    return f", such as {jobs[0]}" if jobs else ""


def _like(file: Path) -> str:
    """The job file next to a missing one that may have been meant: with another ending, or a similar name."""
    try:
        names = sorted(sibling.name for sibling in file.parent.iterdir() if sibling.suffix in (".yaml", ".yml"))
    except (OSError, ValueError):
        return ""
    stem = file.stem if file.suffix.lower() in (".yaml", ".yml") else file.name
    same = [name for name in names if Path(name).stem == stem]
    near = same or difflib.get_close_matches(file.name, names, n=1, cutoff=0.8)
    return f'; did you mean "{file.with_name(near[0])}"?' if near else ""


def _by_themselves(value: Any) -> Any:
    """Copy sections and lists that stand in several places by an alias, so that a flag changes one of them alone."""
    if isinstance(value, dict):
        return {key: _by_themselves(inner) for key, inner in value.items()}
    return [_by_themselves(inner) for inner in value] if isinstance(value, list) else value


def _find_lines(reader: YamlLoader, node: yaml.Node | None, path: Keys, file: Path, sources: dict[Keys, str]) -> None:
    """Record the line of every key and list item; the loader has limited how many there are, aliases counted."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            sources[*path, str(index)] = f"{file}:{item.start_mark.line + 1}"
            _find_lines(reader, item, (*path, str(index)), file, sources)
    if isinstance(node, yaml.MappingNode):
        for name, (key, value) in _merged(reader, node).items():
            sources[*path, name] = f"{file}:{key.start_mark.line + 1}"
            _find_lines(reader, value, (*path, name), file, sources)


def _merged(reader: YamlLoader, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The keys of a section with their values, by name, and after them those that it merges and lacks."""
    result: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: list[yaml.Node] = []
    for key, value in node.value:
        if key.tag == MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        else:
            result[str(reader.construct_object(key, deep=True))] = key, value
    for other in merged:
        if isinstance(other, yaml.MappingNode):
            result = {**_merged(reader, other), **result}
    return result


def _parsed(key: str, text: str, source: str) -> tuple[Keys, Any]:
    """The path of a dotted key, and the value of a flag or variable. Raises UserError for what is neither."""
    path = tuple(key.split("."))
    if path != ("name",) and (len(path) < 2 or path[0] not in ("recipe", "run") or not all(path)):
        raise UserError(
            f'{source}: "{key}" must be a dotted key below recipe or run, such as recipe.optimizer.lr{_whole(key)}'
        )
    try:
        value = parse_yaml(text)
    except DuplicateKeyError as error:
        raise UserError(f"{source}: {error.problem}; keep one of them") from None
    except RefusedError as error:
        raise UserError(f"{source}: {error.problem}") from None
    except yaml.YAMLError:
        value = text
    return path, value


def _leave_out(
    values: dict[str, Any],
    sources: dict[Keys, str],
    of_file: Mapping[Keys, str],
    path: Keys,
    value: Any,
    source: str,
) -> list[str]:
    """Take the file's keys out of a section that becomes another one, such as adamw's betas out of an sgd.

    What both kinds of section have stays. Returns a remark that says what was left out, or none.
    """
    tag = next((tag for tag in TAGS if path[-1] == tag or (isinstance(value, dict) and tag in value)), None)
    if tag is None:
        return []
    path, kind = (path[:-1], value) if path[-1] == tag else (path, value[tag])
    here: Any = values
    for part in path:
        here = here.get(part) if isinstance(here, dict) else None
    if not isinstance(here, dict) or here.get(tag) == kind:
        return []
    before, after = keys_at(Job, path, values), keys_at(Job, path, _with(values, path, {tag: kind}))
    gone = [
        key
        for key in here
        if key in before and key not in after and of_file.get((*path, key)) == sources.get((*path, key))
    ]
    for key in gone:
        del here[key]
        for deeper in [source for source in sources if source[: len(path) + 1] == (*path, key)]:
            del sources[deeper]
    places = ", ".join(f"{key} ({of_file[*path, key]})" for key in gone)
    return [f"{source}: {'.'.join(path)} has no {places}, which is left out"] if gone else []


def _with(values: Mapping[str, Any], path: Keys, section: Any) -> dict[str, Any]:
    """A copy of nested values with another section at a path."""
    if not path:
        return section
    return {**values, path[0]: _with(values.get(path[0]) or {}, path[1:], section)}


def _override(values: dict[str, Any], sources: dict[Keys, str], path: Keys, value: Any, source: str) -> None:
    """Set a key to a value over the file's."""
    key = ".".join(path)
    here = values
    for depth, part in enumerate(path[:-1], start=1):
        if here.get(part) is None:
            here[part] = {}
            sources[path[:depth]] = source
        inner = here[part]
        if not isinstance(inner, dict):
            raise UserError(f'{source}: "{part}" in "{key}" is {shown(inner)}, which has no keys of its own')
        here = inner
    if isinstance(value, dict) and isinstance(here.get(path[-1]), dict):
        here[path[-1]] = {**here[path[-1]], **value}
    else:
        here[path[-1]] = value
    for deeper in [source for source in sources if source[: len(path)] == path and source != path]:
        if not isinstance(value, dict) or deeper[len(path)] in value:
            del sources[deeper]
    _set_source(value, path, source, sources)


def _whole(key: str) -> str:
    """What a key without its section, or of another tool, is called as a whole, for a message."""
    ends = sorted(
        (dotted for dotted in dotted_keys(Job) if dotted.endswith(f".{key}")), key=lambda dotted: dotted.count(".")
    )
    if ends:
        return f"; here it is {ends[0]}"
    meaning = meaning_of(key.rpartition(".")[2])
    return f"; {meaning.as_key()}" if meaning is not None and meaning.key != key else ""


def _set_source(value: Any, path: Keys, source: str, sources: dict[Keys, str]) -> None:
    """Record the source of a value and all values in it."""
    sources[path] = source
    if isinstance(value, dict):
        for name, inner in value.items():
            _set_source(inner, (*path, str(name)), source, sources)


# Keys of shipped tasks that name a file or a folder.
_PATH_KEYS = ("source", "eval_source", "folder", "name", "tokenizer", "chat_template")


def _resolve_paths(job: Job, file: Path) -> Job:
    """Turn relative paths that exist next to the job file into absolute ones.

    A path is looked for next to the job file, then in the current folder (where it is left as it is). A word
    without a dot or a slash is a name, not a path.
    """
    recipe = job.recipe
    base = file.resolve().parent

    def next_to_job(text: Any) -> Any:
        """Resolve a path relative to the job file's folder if it exists there; else return the text."""
        if not isinstance(text, str) or Path(text).is_absolute():
            return text
        path, colon, rest = text.partition(".py:")
        candidate = base / (path + (".py" if colon else ""))
        if not re.search(r"[./]", text) or not _exists(candidate):
            return text
        found_path = str(candidate) + (":" + rest if colon else "")
        return Expanded(found_path, str(base / text.written)) if isinstance(text, Expanded) else found_path

    task = next_to_job(recipe.task)
    data = {key: next_to_job(value) if key in _PATH_KEYS else value for key, value in recipe.data.items()}
    model = {key: next_to_job(value) if key in _PATH_KEYS else value for key, value in recipe.model.items()}
    config = job.run.engine_config
    if config is not None and not config.is_absolute() and _exists(base / config):
        job = replace(job, run=replace(job.run, engine_config=base / config))
    named = {"optimizer": _resolved_optimizer(recipe.optimizer, next_to_job)}
    groups = tuple(
        replace(group, optimizer=_resolved_optimizer(group.optimizer, next_to_job)) if group.optimizer else group
        for group in recipe.groups
    )
    return replace(job, recipe=replace(recipe, task=task, data=data, model=model, groups=groups, **named))


def _resolved_optimizer(optimizer: Any, resolve: Callable[[Any], Any]) -> Any:
    return replace(optimizer, name=resolve(optimizer.name)) if isinstance(optimizer, NamedOptimizer) else optimizer


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a text that is too long for a path
        return False


def plain(value: Any, *, written: bool = False) -> Any:
    """Convert a job, or a part of one, to mappings, lists and scalars of YAML and JSON.

    `written`: for messages and published records; texts keep `${NAME}` as in the job file.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), written=written) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inner, written=written) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, written=written) for inner in value]
    if isinstance(value, Expanded):
        return value.written if written else str(value)
    if isinstance(value, Path):
        return without_values(str(value)) if written else str(value)
    return value if value is None or isinstance(value, (str, int, float, date, bytes, set)) else str(value)


class _Writer(yaml.SafeDumper):
    """YAML's writer, with every value written out in full and in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(writer: _Writer, text: str) -> yaml.Node:
    one_line = text.splitlines() in ([], [text])
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if one_line else '"')


_Writer.add_representer(str, _write_text)


def _one_line(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Writer, default_flow_style=True, allow_unicode=True, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")


def _dump(
    values: Mapping[Hashable, Any], path: Keys, sources: Mapping[Keys, str], lines: list[tuple[str, str]]
) -> None:
    """Lines of YAML, each with where its value came from."""
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, str(key))
        start = f"{indent}{_one_line(key)}:"
        if isinstance(value, dict) and value:
            lines.append((start, ""))
            _dump(value, here, sources, lines)
        else:
            source = " ".join(sources.get(here, "default").split())  # in one line, whatever a flag held
            lines.append((f"{start} {_one_line(value)}", source))
