"""A tiny chat model and rows for it, as `samestep init chat` makes them, and tasks of these."""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep import scaffold
from samestep.recipe import Recipe
from samestep.tasks.registry import resolve


@cache
def template() -> ModuleType:
    """The script of the template that makes its data."""
    path = scaffold.templates()["chat"].folder / "make_data.py"
    spec = importlib.util.spec_from_file_location("chat_make_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_model(folder: Path) -> Path:
    """A model without training, with a tokenizer of the template's texts."""
    texts = [message["content"] for row in template().chats() for message in row["messages"]]
    template().save_model(texts, folder)
    return folder


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def chat_recipe(model: Path, source: Path | str, *, named: Mapping[str, Any] | None = None, **data: Any) -> Recipe:
    """A recipe of task chat. `named`: further keys of recipe.model."""
    return Recipe(
        task="chat",
        data={"source": str(source), "length": 64, **data},
        model={"name": str(model), **(named or {})},
        batch=4,
        steps=2,
    )


def chat_task(model: Path, source: Path | str, *, named: Mapping[str, Any] | None = None, **data: Any) -> Any:
    return resolve(chat_recipe(model, source, named=named, **data))


def shown(task: Any, index: int = 0) -> list[tuple[str, bool]]:
    """The pieces of a sample, and whether they count."""
    return [(piece.text, piece.counts) for piece in task.reading().pieces(index)]


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
