"""The keys of a job file, from the dataclasses that check one: a JSON Schema for editors, and the pages' tables.

`python tools/job_keys.py` writes src/samestep/job.schema.json, which `samestep schema` prints, and the tables between
`<!-- keys NAME -->` and `<!-- end -->` of the pages in both languages. What a key means stands in docs/job-keys.yaml.
`tests/test_job_schema.py` compares both with what is there.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from page_parts import ROOT, markdown_table, write_parts
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from samestep.communication import Bf16, DiLoCo, Fp16, LocalSGD, OneBitAdam, PowerSGD, ZeroOneAdam
from samestep.engines import ENGINES
from samestep.job import Checkpointing, Inject, Job, Log, Profiling, Run
from samestep.recipe import SGD, AdamW, Average, EarlyStop, Evaluation, Group, LoRA, NamedOptimizer, Recipe, Schedule
from samestep.tasks import TASKS
from samestep.tasks.causal_lm import DecoderModel, LanguageData
from samestep.tasks.chat import ChatData
from samestep.tasks.chat_model import ChatModel
from samestep.tasks.image_classification import ImageData, ImageModel
from samestep.tasks.preference import Preference
from samestep.tasks.regression import Regression
from samestep.tasks.text_classification import TextData, TextModel
from samestep.variables import NAMED

MEANINGS = ROOT / "docs" / "job-keys.yaml"
SCHEMA = ROOT / "src" / "samestep" / "job.schema.json"
RECIPE, RUN = "docs/recipe.md", "docs/run.md"


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """A table of keys: where it stands, and the sections whose keys it has, each with what stands before its keys."""

    name: str
    page: str
    sections: Sequence[tuple[type, str]]


METHODS = (Bf16, Fp16, PowerSGD, OneBitAdam, ZeroOneAdam, LocalSGD, DiLoCo)
# What the shipped tasks take as `recipe.data` and `recipe.model`.
TASK_SECTIONS: Mapping[str, tuple[type, type]] = {
    "text-classification": (TextData, TextModel),
    "causal-lm": (LanguageData, DecoderModel),
    "chat": (ChatData, ChatModel),
    "image-classification": (ImageData, ImageModel),
    "preference": (ChatData, ChatModel),
}
# Those that take arguments of their own.
TASK_ARGUMENTS: Mapping[str, type] = {"preference": Preference, "regression": Regression}
TABLES = (
    KeyTable(name="recipe", page=RECIPE, sections=[(Recipe, "recipe")]),
    *(
        KeyTable(name=schema.__name__, page=RECIPE, sections=[(schema, f"recipe.{section}")])
        for section, schema in (
            ("optimizer", AdamW),
            ("optimizer", SGD),
            ("optimizer", NamedOptimizer),
            ("groups", Group),
            ("schedule", Schedule),
            ("average", Average),
            ("evaluation", Evaluation),
            ("adapter", LoRA),
            ("early_stop", EarlyStop),
        )
    ),
    KeyTable(name="communication", page=RECIPE, sections=[(method, "recipe.communication") for method in METHODS]),
    KeyTable(name="run", page=RUN, sections=[(Run, "run")]),
    KeyTable(name="log", page=RUN, sections=[(Log, "run.log")]),
    KeyTable(name="checkpoint", page=RUN, sections=[(Checkpointing, "run.checkpoint")]),
    KeyTable(name="profile", page=RUN, sections=[(Profiling, "run.profile")]),
    KeyTable(name="inject", page=RUN, sections=[(Inject, "run.inject")]),
    *(
        KeyTable(name=task, page=RECIPE, sections=[(data, "recipe.data"), (model, "recipe.model")])
        for task, (data, model) in TASK_SECTIONS.items()
        if task != "preference"  # it has the keys of chat
    ),
    *(KeyTable(name=name, page=RECIPE, sections=[(task, "recipe.args")]) for name, task in TASK_ARGUMENTS.items()),
)


@cache
def meanings() -> dict[str, dict[str, dict[str, Any]]]:
    """Class -> key -> what it means, in "en" and "zh"; "type" and "default" where words say more than the code."""
    return yaml.safe_load(MEANINGS.read_text(encoding="utf-8"))


# ---- the schema


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file."""
    schema = TypeAdapter(Job).json_schema()
    for section in (part for pair in TASK_SECTIONS.values() for part in pair):
        schema["$defs"][section.__name__] = TypeAdapter(section).json_schema()
    schema["$defs"] |= {task.__name__: _arguments(task) for task in TASK_ARGUMENTS.values()}
    _normalize(schema)
    sections = schema["$defs"]
    known = meanings()
    for name, section in (*sections.items(), ("Job", schema)):
        for key, value in section.get("properties", {}).items():
            value.pop("title", None)
            if (meaning := known.get(name, {}).get(key)) is not None:
                value["description"] = _plain(meaning["en"])
    _say_which_optimizer(sections)
    _name_tasks_and_engines(sections)
    for section in (schema, *sections.values()):
        section["properties"] = {key: _or_variable(value) for key, value in section.get("properties", {}).items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A job file of samestep",
        "description": "What is trained (recipe), and how it is run (run).",
    }


def _arguments(task: type) -> dict[str, Any]:
    """The schema of a task's arguments."""
    hints = get_type_hints(task.__init__, include_extras=True)
    properties = {
        name: {**TypeAdapter(hints[name]).json_schema(), "default": parameter.default}
        for name, parameter in inspect.signature(task).parameters.items()
        if name not in ("data", "model")  # sections of the recipe
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


_LINE = 200  # characters of a line of the schema
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _normalize(node: Any) -> None:
    """Write limits as JSON Schema does: behind a function that checks first, pydantic leaves its own words."""
    if isinstance(node, list):
        for item in node:
            _normalize(item)
    if not isinstance(node, dict):
        return
    for old, new in _LIMITS.items():
        if isinstance(node.get(old), (int, float)):
            node[new] = node.pop(old)
    if "oneOf" in node:  # with tags of their own, of which OpenAPI alone knows
        node["anyOf"] = node.pop("oneOf")
        node.pop("discriminator", None)
    for value in node.values():
        _normalize(value)


def _say_which_optimizer(sections: dict[str, Any]) -> None:
    """adamw is meant where no name is given; sgd and the methods are named; any other name is that of a callable."""
    sections["SGD"]["required"] = ["name"]
    for method in METHODS:
        sections[method.__name__]["required"] = ["kind"]
    sections["NamedOptimizer"]["properties"]["name"].update(type="string", pattern="[.:]")


def _name_tasks_and_engines(sections: dict[str, Any]) -> None:
    """Which tasks and engines there are, and what each task takes."""
    recipe = sections["Recipe"]
    recipe["properties"]["task"].update(anyOf=[{"enum": sorted(TASKS)}, {"type": "string", "pattern": r"\.py:\w+$"}])
    sections["Run"]["properties"]["engine"].update(enum=sorted(ENGINES))
    empty: dict[str, Any] = {"maxProperties": 0}
    recipe["allOf"] = []
    for task in sorted(TASKS):
        data, model = TASK_SECTIONS.get(task, (None, None))
        then = {
            "data": {"$ref": f"#/$defs/{data.__name__}"} if data else empty,
            "model": {"$ref": f"#/$defs/{model.__name__}"} if model else empty,
            "args": {"$ref": f"#/$defs/{TASK_ARGUMENTS[task].__name__}"} if task in TASK_ARGUMENTS else empty,
        }
        named = {"required": ["task"], "properties": {"task": {"const": task}}}
        recipe["allOf"].append({"if": named, "then": {"properties": then}})


def _or_variable(value: dict[str, Any]) -> dict[str, Any]:
    """A key's schema, which also takes ${NAME} in place of a number, a word or a path."""
    kinds = value.get("anyOf", [value])
    scalar = any(kind.get("type") in ("integer", "number", "boolean", "string") or "enum" in kind for kind in kinds)
    any_text = any(kind.get("type") == "string" and kind.keys().isdisjoint(("enum", "pattern")) for kind in kinds)
    if not scalar or any_text or "const" in value:
        return value
    about = {key: value[key] for key in ("default", "description") if key in value}
    bare = [{key: inner for key, inner in kind.items() if key not in about} for kind in kinds]
    return {**about, "anyOf": [*bare, {"type": "string", "pattern": NAMED.pattern}]}


def _plain(text: str) -> str:
    """Markdown without its links and what refers to the page, which lead nowhere from an editor."""
    return re.sub(r"; \[?below\]?(\(#[^)]*\))?|\[([^]]*)\]\([^)]*\)", r"\2", text)


# ---- the tables

_TITLES = {"en": ("key", "type", "default", "meaning"), "zh": ("键", "类型", "默认值", "含义")}
_MUST = {"en": "must be given", "zh": "必须给出"}
_WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "boolean": "true or false",
        "string": "text",
        "path": "path",
        "object": "section",
        "time": "`30s`, `10m`, `2h`",
        "seconds": "seconds",
        "array": "list of texts",
        "sections": "list of sections",
        "integer": "whole number",
        "number": "number",
        "from": "{what} from {least}",
        "above": "{what} above {least}",
        "to": "{what} from {least} to {most}",
        "above-to": "{what} above {least}, up to {most}",
        "from-below": "{what} from {least}, below {most}",
        "two": "two of: {what}",
        "comma": ", ",
        "or": ", or ",
    },
    "zh": {
        "boolean": "true 或 false",
        "string": "文本",
        "path": "路径",
        "object": "一节",
        "time": "`30s`、`10m`、`2h`",
        "seconds": "秒数",
        "array": "文本的列表",
        "sections": "若干节的列表",
        "integer": "整数",
        "number": "数",
        "from": "不小于 {least} 的{what}",
        "above": "大于 {least} 的{what}",
        "to": "{least} 到 {most} 的{what}",
        "above-to": "大于 {least}、不超过 {most} 的{what}",
        "from-below": "从 {least} 起、小于 {most} 的{what}",
        "two": "两个{what}",
        "comma": "、",
        "or": "，或 ",
    },
}
_LARGE = 10_000  # limits above this one are far from what anybody writes


def key_table(table: KeyTable, language: str) -> str:
    """A table of keys in Markdown."""
    rows = [row for section, prefix in table.sections for row in _rows(section, prefix, language)]
    return markdown_table(_TITLES[language], rows, align="llll")


def _rows(section: type, prefix: str, language: str) -> Iterator[list[str]]:
    known = meanings().get(section.__name__, {})
    for name, value, default in _keys(section):
        meaning = known.get(name)
        if meaning is None:
            raise SystemExit(f"docs/job-keys.yaml has no {section.__name__}.{name}: what does it mean, in en and zh?")
        kind = meaning["type"][language] if "type" in meaning else _type_words(value, language)
        if "default" in meaning:
            shown = meaning["default"][language]
        else:
            shown = _MUST[language] if default is MISSING else f"`{_default_text(default)}`"
        yield [f"`{prefix}.{name}`", kind, shown, meaning[language]]


def _keys(section: type) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Name, schema and default of each key of a section; MISSING where it must be given."""
    if not is_dataclass(section):
        for name, value in _arguments(section)["properties"].items():
            _normalize(value)
            yield name, value, value["default"]
        return
    schema = TypeAdapter(section).json_schema()
    _normalize(schema)
    for field in fields(section):
        default = field.default
        if isinstance(default, FieldInfo):
            default = default.get_default(call_default_factory=True)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        yield field.name, schema["properties"][field.name], default


def _default_text(default: Any) -> str:
    """A default as a job file has it."""
    if isinstance(default, float):
        return f"{default:.8f}".rstrip("0") if 0 < default < 1e-3 else repr(default)
    text = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _type_words(value: Mapping[str, Any], language: str) -> str:
    words = _WORDS[language]
    kinds = [kind for kind in _alternatives(value) if kind.get("type") != "null"]
    names = [_one_type(kind, words) for kind in kinds]
    if names[-1:] == [words["time"]] and kinds[0].get("type") == "number":
        names[0] = words["seconds"]
    return words["or"].join(dict.fromkeys(names))


def _alternatives(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [inner for kind in value["anyOf"] for inner in _alternatives(kind)] if "anyOf" in value else [value]


def _one_type(value: Mapping[str, Any], words: Mapping[str, str]) -> str:
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return words["comma"].join(f"`{each}`" for each in value["enum"])
    kind = "object" if "$ref" in value else value.get("type", "string")
    if kind == "string" and "pattern" in value:
        return words["time"]
    if kind == "string" and value.get("format") == "path":
        return words["path"]
    if kind == "array" and "prefixItems" in value:
        return words["two"].format(what=_one_type(value["prefixItems"][0], words))
    if kind == "array" and "$ref" in value["items"]:
        return words["sections"]
    return _number(value, words) if kind in ("integer", "number") else words[kind]


def _number(value: Mapping[str, Any], words: Mapping[str, str]) -> str:
    what = words[value["type"]]
    least, above = value.get("minimum"), value.get("exclusiveMinimum")
    most, below = value.get("maximum"), value.get("exclusiveMaximum")
    if value["type"] == "integer" and above is not None and most is not None and most <= _LARGE:
        least, above = above + 1, None
    if below is not None:
        return words["from-below"].format(what=what, least=least, most=f"{below:,}")
    shown = None if most is None or most > _LARGE else f"{most:,}".removesuffix(".0")
    if above is not None:
        return words["above" if shown is None else "above-to"].format(what=what, least=above, most=shown)
    return words["from" if shown is None else "to"].format(what=what, least=least, most=shown)


def pages_of(table: KeyTable) -> Mapping[str, Path]:
    page = ROOT / table.page
    return {"en": page, "zh": ROOT / "docs" / "zh" / page.relative_to(ROOT / "docs")}


def schema_text() -> str:
    return _json_text(job_schema(), "") + "\n"


def _json_text(node: Any, indent: str) -> str:
    """JSON with a line for whatever fits one, so that a changed key is a changed line."""
    short = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, dict) or len(indent) + len(short) <= _LINE:
        return short
    inner = f"{indent} "
    rows = [f"{inner}{json.dumps(key)}: {_json_text(value, inner)}" for key, value in node.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> None:
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    for table in TABLES:
        for language, page in pages_of(table).items():
            write_parts(page, {f"keys {table.name}": key_table(table, language)})


if __name__ == "__main__":
    main()
