"""What readers and writers of other tools' configurations share.

A `Draft` collects the keys of a job that a reader found, and a remark for every value that has no counterpart.
`SectionKeys` reads a section and tracks which of its keys were read, so that none is ignored silently.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import yaml

from samestep.engines.config_file import check_section, switch_of
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout, Offload
from samestep.validation import checked, closest, shown

# The layout part for the data ranks, by ZeRO stage; without a number if their size is not known.
_DATA = {0: "dp{}", 1: "zero1x{}", 2: "zero2x{}", 3: "fsdp{}"}
_ORDER_OF_OFFLOADS = get_args(Offload)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Mesh sizes. One of `data` and `replicas` may be None: it follows from the number of processes."""

    pipeline: int = 1
    replicas: int | None = 1  # replicas of the shards, if there are both
    data: int | None = None  # shards, or replicas if `zero` is 0
    zero: int = 0
    context: int = 1
    tensor: int = 1
    offload: Collection[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> int:
        """The number of ranks that compute on the same samples."""
        return self.pipeline * self.context * self.tensor


def text_of(sizes: Sizes) -> str:
    """The layout in its shortest text."""
    named = {"pp{}": sizes.pipeline, "dp{}": sizes.replicas, _DATA[sizes.zero]: sizes.data}
    named |= {"cp{}": sizes.context, "tp{}": sizes.tensor}
    parts = [part.format(size or "") for part, size in named.items() if size != 1]
    options = dict(sizes.options)
    if offloads := _together(sizes.offload):
        options["offload"] = "+".join(offloads)
    text = " ".join([*parts, *(f"{name}={value}" for name, value in options.items())]) or "single"
    return text if None in (sizes.data, sizes.replicas) else str(Layout.parse(text))


def _together(offloads: Collection[str]) -> list[str]:
    """Remove implied offloads: those of parameters include the optimizer's, and those to disk replace memory's."""
    all_offloads = set(offloads)
    if "parameters-disk" in all_offloads:
        all_offloads -= {"parameters"}
    if {"parameters", "parameters-disk"} & all_offloads:
        all_offloads -= {"optimizer", "optimizer-disk"}
    if "optimizer-disk" in all_offloads:
        all_offloads -= {"optimizer"}
    return [name for name in _ORDER_OF_OFFLOADS if name in all_offloads]


# The task of a translated job, which no other tool's configuration names.
UNKNOWN_TASK = "my_task.py:MyTask"

# The order of keys in a job file, as in docs/recipe.md and docs/run.md.
_ORDER = ("task", "seed", "batch", "steps", "epochs", "optimizer", "schedule", "clip", "precision")
_LONGEST = 116  # characters per line; a comment that would make a line longer goes above it

_TASK_REMARK = "not in the source: your task; its data and model go next to it"


class Draft:
    """The keys of a job with comments on their origin, and remarks on values that have no key in a job."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {"recipe": {}, "run": {}}
        self._reasons: dict[str, str] = {}
        self._sizes = Sizes(data=1)
        self.remarks: list[str] = []

    def set(self, key: str, value: Any, why: str = "") -> None:
        """Set a key such as recipe.optimizer.lr; `why`: a comment on the value's origin, if that isn't obvious."""
        *path, last = key.split(".")
        here = self._values
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
        if why:
            self._reasons[key] = why

    def set_layout(self, sizes: Sizes, why: str = "") -> None:
        self._sizes = sizes
        self.set("run.layout", text_of(sizes), why)

    def tried_layout(self) -> str:
        """The layout with size 2 where the number of processes is not known yet."""
        return text_of(replace(self._sizes, data=self._sizes.data or 2, replicas=self._sizes.replicas or 2))

    def get(self, key: str) -> Any:
        here: Any = self._values
        for part in key.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return here

    def remark(self, source: str, value: Any, why: str) -> None:
        """Add a remark on a value without counterpart: its place, the value, what to use instead."""
        self.remarks.append(f"{source}: {why}" if value is None else f"{source} = {shown(value)}: {why}")

    def values(self) -> dict[str, Any]:
        recipe = {"task": UNKNOWN_TASK, **self._values["recipe"]}
        return {"recipe": _in_order(recipe), **({"run": self._values["run"]} if self._values["run"] else {})}

    def job(self) -> Job:
        """The checked job. Raises UserError for values that a job can't have."""
        return checked(Job, self.values())

    def text(self, title: str) -> str:
        """The text of the job file: keys with their comments, then the remarks."""
        lines = [f"# Translated from {title}."]
        reasons = {"recipe.task": _TASK_REMARK, **self._reasons}
        _write(self.values(), (), reasons, lines)
        if self.remarks:
            lines += ["", "# Without a key here:", *(f"# - {' '.join(text.split())}" for text in self.remarks)]
        return "\n".join(lines) + "\n"


def _in_order(recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: recipe[key] for key in _ORDER if key in recipe}


def _write(values: Mapping[str, Any], path: tuple[str, ...], reasons: Mapping[str, str], lines: list[str]) -> None:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        why = " ".join(reasons.get(".".join(here), "").split())
        nested = isinstance(value, Mapping)
        line = f"{indent}{key}:" if nested else f"{indent}{key}: {one_line(value)}"
        if why and len(line) + len(why) + 4 > _LONGEST:
            lines.append(f"{indent}# {why}")
            why = ""
        lines.append(f"{line}  # {why}" if why else line)
        if nested:
            _write(value, here, reasons, lines)


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


# The value that transformers' Trainer and accelerate replace from their own arguments.
AUTO = "auto"


class SectionKeys:
    """Reads a section's keys, and tracks which were read."""

    def __init__(self, values: Any, draft: Draft, place: str = "") -> None:
        check_section(values, place or "the file")
        self._values = {str(key): value for key, value in values.items() if value is not None}
        self._left = dict(self._values)
        self._draft = draft
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def place(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key

    def take(self, key: str) -> Any:
        """Read a value unchanged; None if it is missing, or is "auto", which gets a remark."""
        value = self._left.pop(key, self._values.get(key))
        if value == AUTO:
            self._draft.remark(self.place(key), AUTO, "filled in by the script's own arguments; write their value")
            return None
        return value

    def whole(self, key: str, least: int = 1) -> int | None:
        value = self.take(key)
        number = _number(value)
        if value is None:
            return None
        if number is None or number != int(number) or number < least:
            raise self._wrong(key, value, f"a whole number of {least} or more")
        return int(number)

    def number(self, key: str, least: float = 0.0) -> float | None:
        value = self.take(key)
        number = _number(value)
        if value is not None and (number is None or number < least):
            raise self._wrong(key, value, f"a number of {least:g} or more")
        return number

    def switch(self, key: str) -> bool | None:
        value = self.take(key)
        if value is None:
            return None
        switched = switch_of(value)
        if switched is None:
            raise self._wrong(key, value, "true or false")
        return switched

    def word(self, key: str, choices: Collection[str]) -> str | None:
        """Read one of several words in any case; returns it as written in `choices`."""
        value = self.take(key)
        if value is None:
            return None
        for choice in choices:
            if str(value).lower() == choice.lower():
                return choice
        raise UserError(f"{self.place(key)} is {shown(value)}; {closest(str(value), choices)}")

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def section(self, key: str) -> "SectionKeys":
        """Read an inner section; an empty one if it is missing."""
        value = self._left.pop(key, {})
        return SectionKeys({} if value is None else value, self._draft, self.place(key))

    def enabled(self, key: str) -> "SectionKeys":
        """Read an inner section with a switch `enabled`; an empty one, with a remark, if that is off."""
        section = self.section(key)
        if section and not section.switch("enabled"):
            self._draft.remark(self.place(key), None, "not enabled")
            return SectionKeys({}, self._draft, self.place(key))
        return section

    def remark(self, key: str, why: str) -> None:
        """Read a key that has no counterpart, and add a remark with the reason."""
        if key in self._values:
            self._left.pop(key, None)
            self._draft.remark(self.place(key), self._values[key], why)

    def leave(self, reasons: Mapping[str, str], otherwise: str) -> None:
        """Add a remark for each key that was not read: the reason in `reasons`, or else `otherwise`."""
        for key in list(self._left):
            self.remark(key, reasons.get(key, otherwise))

    def _wrong(self, key: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.place(key)} is {shown(value)}; it should be {expected}")


def _number(value: Any) -> float | None:
    """Convert a value to a number, also from text: YAML reads 1e-5 as text, and such files often have quotes."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # a whole number of hundreds of digits
        return None
    return number if abs(number) != float("inf") and number == number else None


@dataclass(frozen=True, kw_only=True)
class GivenSizes:
    """Sizes of the whole training from the command line, which many of these files don't contain."""

    processes: int | None = None
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """The text of a written file, and remarks on what it can't express."""

    text: str
    remarks: Sequence[str] = ()


class ConfigReader(ABC):
    """Reads another tool's configuration into the draft of a job."""

    title: str  # name of such a file in messages and comments

    @abstractmethod
    def recognises(self, content: Any) -> bool:
        """Whether a file's content is of this format: its parsed value (a dictionary, say), or its text."""

    @abstractmethod
    def read(self, content: Any, user_sizes: GivenSizes) -> Draft:
        """Read the content. Raises UserError for values that are wrong or contradict each other."""


class ConfigWriter(ABC):
    """Writes a job as another tool's configuration."""

    @abstractmethod
    def write(self, job: Job, layout: Layout) -> Written:
        """Write the configuration. Raises UserError for a job that the tool could not run."""


def has_any(content: Any, keys: Sequence[str]) -> bool:
    """Whether the content is a section with at least one of these keys."""
    return isinstance(content, Mapping) and any(key in content for key in keys)
