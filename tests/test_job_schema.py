"""The schema of job files that editors read, and the tables of keys: made from the declarations that check a job.

What the schema refuses the checks refuse, and what they take it takes: of each key its limits, its words, its types.
"""

import copy
import json
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from job_keys import TABLES, job_schema, key_table, pages_of, schema_text
from page_parts import read_part
from pydantic import TypeAdapter, ValidationError

from samestep import UserError, jobfile, scaffold
from samestep.cli.main import main
from samestep.job import Job
from samestep.tasks import TASKS
from samestep.tasks.registry import arguments_of
from samestep.yaml_loader import parse_yaml

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = job_schema()


@cache
def validator() -> Any:
    """Of the schema. Imported here: it takes a second, and every worker collects all files."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator(SCHEMA)


SMALLEST: dict[str, Any] = {"recipe": {"task": "regression"}}


def refused_by_the_schema(job: Any) -> bool:
    return not validator().is_valid(job)


def refused_by_the_checks(job: Any) -> bool:
    """Whether a job of a file would be refused before its task reads any data."""
    try:
        made = TypeAdapter(Job).validate_python(copy.deepcopy(job))
        named = str(made.recipe.task)
        if named not in TASKS:
            return ".py:" not in named
        arguments_of(pkgutil.resolve_name(TASKS[named]), made.recipe)
    except (ValidationError, UserError):
        return True
    return False


def test_the_schema_and_the_tables_are_those_of_the_declarations() -> None:
    """After a change: python tools/job_keys.py."""
    assert scaffold.JOB_SCHEMA.read_text(encoding="utf-8") == schema_text()
    for table in TABLES:
        for language, page in pages_of(table).items():
            assert read_part(page, f"keys {table.name}") == key_table(table, language), (page, table.name)


def test_the_schema_is_one_and_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    validator().check_schema(SCHEMA)
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


@pytest.mark.parametrize(
    "file",
    [
        *sorted((ROOT / "examples").rglob("*.yaml")),
        *sorted((ROOT / "src" / "samestep" / "templates").rglob("job.yaml")),
    ],
    ids=lambda file: file.relative_to(ROOT).as_posix(),
)
def test_every_job_that_ships_is_taken(file: Path) -> None:
    job = parse_yaml(file.read_text(encoding="utf-8"))
    if isinstance(job, dict) and "recipe" in job:
        assert [error.message for error in validator().iter_errors(job)] == []
        jobfile.load(file)


@pytest.mark.parametrize(
    "job",
    [
        {},
        [],
        {"recipe": None},
        {"recipe": {}},
        {"recipe": "regression"},
        {"recipe": {"task": "regresion"}},
        {"recipe": {"task": 3}},
        {"recipe": {"task": "regression", "bacth": 64}},
        {"recipe": {"task": "regression", "model": {"layers": 2}}},
        {"recipe": {"task": "regression", "args": {"sample": 2}}},
        {"recipe": {"task": "text-classification", "model": {"layer": 2}}},
        {"recipe": {"task": "causal-lm", "args": {"samples": 2}}},
        {"recipe": {"task": "image-classification", "data": {"color": "red"}}},
        {"recipe": {"task": "regression", "optimizer": {"name": "adam"}}},
        {"recipe": {"task": "regression", "optimizer": {"name": "sgd", "betas": [0.9, 0.99]}}},
        {"recipe": {"task": "regression", "optimizer": {"momentum": 0.9}}},
        {"recipe": {"task": "regression", "optimizer": {"name": "adamw", "args": {}}}},
        {"recipe": {"task": "regression", "optimizer": {"args": {}}}},
        {"recipe": {"task": "regression", "optimizer": {"betas": [0.9]}}},
        {"recipe": {"task": "regression", "communication": {"rank": 2}}},
        {"recipe": {"task": "regression", "communication": {"kind": "bf16", "rank": 2}}},
        {"recipe": {"task": "regression", "groups": [{"lr": 0.1}]}},
        {"recipe": {"task": "regression", "groups": {"parameters": "*", "lr": 0.1}}},
        {"recipe": {"task": "regression", "early_stop": {"patience": 2}}},
        {"recipe": {"task": "regression"}, "run": {"layout": 2}},
        {"recipe": {"task": "regression"}, "run": {"engine": "megatron", "hang_limit": "soon"}},
        {"recipe": {"task": "regression"}, "run": {"checkpoint": {"every": "soon"}}},
        {"recipe": {"task": "regression"}, "run": {"checkpoint": {"every": True}}},
        {"recipe": {"task": "regression"}, "run": {"profile": "yes"}},
        {"recipe": {"task": "regression"}, "run": {"inject": {"rank": 0, "fault": "kill"}}},
        {"recipe": {"task": "regression"}, "run": {"tensor_plan": {"layer": "sideways"}}},
        {"recipe": {"task": "regression"}, "layout": "dp2"},
    ],
    ids=str,
)
def test_a_wrong_job_is_refused_by_both(job: Any) -> None:
    assert refused_by_the_schema(job)
    assert refused_by_the_checks(job)


@pytest.mark.parametrize(
    "changes",
    [
        {"run.hang_limit": "90s"},
        {"run.hang_limit": "1.5 m"},
        {"run.grace_period": 30},
        {"run.checkpoint.every": "10m"},
        {"run.checkpoint.every": 10},
        {"run.sparse_rows": True},
        {"run.profile": True},
        {"run.profile": {"steps": 3}},
        {"run.inject": {"rank": 0, "step": 1, "fault": "kill"}},
        {"run.inject": [{"rank": 0, "step": 1, "fault": "kill"}]},
        {"run.processes": "${RANKS}"},
        {"recipe.precision": "${PRECISION}"},
        {"recipe.groups": [{"parameters": "*.bias", "lr": 0.1}, {"parameters": ["a", "b"], "lr": 0.1}]},
        {"recipe.adapter": {"targets": "q_proj"}},
        {"recipe.optimizer": {"lr": 0.1}},
        {"recipe.optimizer": {"name": "torch.optim.RAdam", "args": {"betas": [0.9, 0.95]}}},
        {
            "recipe.task": "tasks/own.py:Own",
            "recipe.data": {"any": 1},
            "recipe.model": {"thing": 2},
            "recipe.args": {"at": 3},
        },
    ],
    ids=str,
)
def test_what_the_checks_take_in_place_of_a_fields_own_type_is_taken(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = copy.deepcopy(SMALLEST)
    for key, value in changes.items():
        put(job, tuple(key.split(".")), value)
    assert [error.message for error in validator().iter_errors(job)] == []
    monkeypatch.setenv("RANKS", "2")
    monkeypatch.setenv("PRECISION", "bf16")
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job), encoding="utf-8")
    jobfile.load(file)


def put(job: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        job = job.setdefault(part, {})
    job[path[-1]] = value


def properties(section: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every key below a section of the schema, with the places that lead there."""
    for key, value in section.get("properties", {}).items():
        yield (*path, key), value
        kinds = value.get("anyOf", [value])
        for kind in kinds:
            name = kind.get("$ref", "").rpartition("/")[2]
            if name not in ("", "AdamW", "SGD", "NamedOptimizer"):
                yield from properties(SCHEMA["$defs"][name], (*path, key))


def wrong_values(value: dict[str, Any]) -> Iterator[Any]:
    """Values just beyond a key's limits, beside its words, and of other types."""
    kinds = value.get("anyOf", [value])
    types = {kind.get("type") for kind in kinds}
    if all("enum" not in kind and kind.get("type") in ("integer", "number", "null", None) for kind in kinds[:1]):
        kind = kinds[0]
        if "minimum" in kind:
            yield kind["minimum"] - 1
        if "exclusiveMinimum" in kind:
            yield kind["exclusiveMinimum"]
        if "maximum" in kind:
            yield kind["maximum"] + 1
        if "exclusiveMaximum" in kind:
            yield kind["exclusiveMaximum"]
    if any("enum" in kind for kind in kinds):
        yield "none of these words"
    if types & {"integer", "number", "boolean"}:
        yield "some words"
        yield [1]
    if not types & {"boolean", None} and "$ref" not in str(value):
        yield True
    if types <= {"string", "null"} and "string" in types:
        yield 3


def test_a_value_beyond_a_keys_limits_or_of_another_type_is_refused_by_both() -> None:
    counts = 0
    for path, value in properties(SCHEMA, ()):
        for wrong in wrong_values(value):
            if path in (("recipe", "task"), ("run", "engine")) or "const" in value:
                continue
            job = copy.deepcopy(SMALLEST)
            put(job, path, wrong)
            assert refused_by_the_schema(job), (path, wrong)
            assert refused_by_the_checks(job), (path, wrong)
            counts += 1
    assert counts > 150


def test_a_key_at_its_limit_is_taken_by_both() -> None:
    """But where its rule depends on other keys, which no schema knows."""
    others = ("batch", "every", "warm_up", "epochs", "steps", "min_processes", "processes")
    for path, value in properties(SCHEMA["$defs"]["Run"], ("run",)):
        kind = value.get("anyOf", [value])[0]
        for limit in ("minimum", "maximum"):
            if limit in kind and path[-1] not in others and len(path) == 2:
                job = copy.deepcopy(SMALLEST)
                put(job, path, kind[limit])
                assert not refused_by_the_schema(job), (path, kind)
                assert not refused_by_the_checks(job), (path, kind)


@pytest.mark.processes
def test_init_writes_the_schema_and_the_line_by_which_editors_find_it(tmp_path: Path) -> None:
    job, *others = scaffold.write("own", tmp_path / "job")
    first, second, *_ = job.read_text(encoding="utf-8").splitlines()
    place = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads((job.parent / place).read_text(encoding="utf-8")) == SCHEMA
    assert job.parent / place in others
    assert second.startswith("# ")
    assert jobfile.load(job).job.recipe.task
