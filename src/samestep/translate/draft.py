"""Draft: the keys of a job that a translation has found, and a remark for everything that has none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from samestep.job import Job
from samestep.translate.layout_text import Sizes, text_of
from samestep.validation import checked, shown

# What no other tool's configuration says.
UNKNOWN_TASK = "my_task.py:MyTask"

# In the order in which docs/recipes-and-layouts.md has them.
_ORDER = ("task", "seed", "batch", "steps", "epochs", "optimizer", "schedule", "clip", "precision")
_LONGEST = 116  # characters of a line; a comment that makes it longer goes above the line

_TASK_REMARK = "not in the source: your task; its data and model go beside it"


class Draft:
    """Keys of a job with the reason for each, and what of the source has no key here."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {"recipe": {}, "run": {}}
        self._reasons: dict[str, str] = {}
        self._sizes = Sizes(data=1)
        self.remarks: list[str] = []

    def set(self, key: str, value: Any, why: str = "") -> None:
        """A key such as recipe.optimizer.lr, and where its value comes from, if that isn't plain."""
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
        """The layout, with a size for what the number of processes is yet to fill in."""
        return text_of(replace(self._sizes, data=self._sizes.data or 2, replicas=self._sizes.replicas or 2))

    def get(self, key: str) -> Any:
        here: Any = self._values
        for part in key.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return here

    def remark(self, source: str, value: Any, why: str) -> None:
        """Something of the source that has no counterpart: where it stands, what it says, what would do."""
        self.remarks.append(f"{source}: {why}" if value is None else f"{source} = {shown(value)}: {why}")

    def values(self) -> dict[str, Any]:
        recipe = {"task": UNKNOWN_TASK, **self._values["recipe"]}
        return {"recipe": _in_order(recipe), **({"run": self._values["run"]} if self._values["run"] else {})}

    def job(self) -> Job:
        """Raises UserError where the source's values can't stand in a job."""
        return checked(Job, self.values())

    def text(self, title: str) -> str:
        """The job file: keys with their reasons, then the remarks."""
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
    """A value as YAML, in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
