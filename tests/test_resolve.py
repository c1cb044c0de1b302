"""From a recipe to its task: the class is found, its arguments are checked, and each mistake is one line."""

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.tasks import TASKS
from samestep.tasks.base import Task
from samestep.tasks.registry import import_file, resolve
from samestep.tasks.regression import Regression

pytestmark = pytest.mark.quick

METHODS = """
    def model(self): ...
    def train_set(self): ...
    def loss(self, output, batch): ...
"""

OWN = f"""\
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from samestep.tasks.base import Task

if TYPE_CHECKING:
    from nowhere import Unknown

@dataclass(frozen=True)
class Inner:
    size: int = 1

@dataclass(frozen=True)
class Source:
    folder: Path
    inner: Inner = Inner()

class Opaque:
    pass

@dataclass
class Holder:
    opaque: Opaque

class Plain(Task):
{METHODS}
class Own(Task):
    def __init__(self, hidden: int, rate: float = 0.5, names: list[str] | None = None):
        self.hidden, self.rate, self.names = hidden, rate, names
{METHODS}
class WithData(Task):
    def __init__(self, data: Source, model: dict[str, int]):
        self.data, self.model_ = data, model
{METHODS}
class MayHaveData(Task):
    def __init__(self, data: Source | None = None):
        self.data = data
{METHODS}
class Loose(Task):
    def __init__(self, unhinted, unseen: "Unknown", **rest):
        self.unhinted, self.unseen, self.rest = unhinted, unseen, rest
{METHODS}
class Odd(Task):
    def __init__(self, opaque: Opaque | None = None, holder: Holder = None):
        self.opaque, self.holder = opaque, holder
{METHODS}
@dataclass
class AsDataclass(Task):
    hidden: int
    rate: float = 0.5
{METHODS}
class Broken(Task):
    def __init__(self):
        raise RuntimeError("no luck")
{METHODS}
class Picky(Task):
    def __init__(self, hidden: int):
        from samestep.errors import UserError
        raise UserError(f"recipe.args.hidden is {{hidden}}; use 7")
{METHODS}
class Partial(Task):
    def loss(self, output, batch): ...

class NoTask:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A file with tasks of the user's own, which is forgotten after the test."""
    file = tmp_path / "own.py"
    file.write_text(OWN, encoding="utf-8")
    known = set(sys.modules)
    yield file
    for name in set(sys.modules) - known:
        if name.startswith("samestep_task_"):
            del sys.modules[name]


def build(file: Path, name: str, **recipe: Any) -> Any:
    return resolve(Recipe(task=f"{file}:{name}", **recipe))


def refusal(recipe: Recipe, folder: Path | None = None) -> str:
    """The message with which a recipe is refused, without the folder of its task."""
    with pytest.raises(UserError) as caught:
        resolve(recipe)
    message = str(caught.value)
    return message.replace(f"{folder}/", "") if folder else message


@pytest.mark.parametrize("name", TASKS)
def test_every_shipped_task_is_where_the_table_says(name: str) -> None:
    module, _, class_name = TASKS[name].partition(":")
    assert issubclass(getattr(importlib.import_module(module), class_name), Task)


def test_a_shipped_task_is_built_with_its_arguments() -> None:
    task = resolve(Recipe(task="regression", args={"samples": 8, "held_out": 3}))
    assert isinstance(task, Regression)
    assert len(task.train_set()) == 8
    held_out = task.eval_set()
    assert held_out is not None
    assert len(held_out) == 3


def test_a_task_object_is_taken_as_it_is() -> None:
    task = Regression(samples=4)
    assert resolve(Recipe(task=task)) is task


@pytest.mark.parametrize("section", ["data", "model", "args"])
def test_a_task_object_takes_no_sections(section: str) -> None:
    given: dict[str, Any] = {section: {"samples": 3}}
    recipe = Recipe(task=Regression(samples=4), **given)
    assert refusal(recipe) == f"recipe.{section} is given, but recipe.task is already a task object"


def test_a_task_of_a_file_is_built_with_arguments_of_their_types(own: Path) -> None:
    task = build(own, "Own", args={"hidden": 3, "rate": "1e-3", "names": ["a"]})
    assert (task.hidden, task.rate, task.names) == (3, 0.001, ["a"])
    assert type(task).__module__ in sys.modules


@pytest.mark.parametrize("name", ["Plain", "MayHaveData"])
def test_a_task_may_need_no_arguments(own: Path, name: str) -> None:
    assert type(build(own, name)).__name__ == name


def test_sections_are_handed_over_whole(own: Path) -> None:
    task = build(own, "WithData", data={"folder": "here", "inner": {"size": 2}}, model={"layers": 3})
    assert (task.data.folder, task.data.inner.size, task.model_) == (Path("here"), 2, {"layers": 3})


def test_an_empty_section_leaves_a_default_in_place_but_fills_one_that_must_be_given(own: Path) -> None:
    assert build(own, "MayHaveData").data is None
    assert build(own, "MayHaveData", data={"folder": "x"}).data.folder == Path("x")
    assert refusal(Recipe(task=f"{own}:WithData")) == "recipe.data.folder is missing"


def test_arguments_without_a_hint_are_handed_over_as_they_are(own: Path) -> None:
    task = build(own, "Loose", args={"unhinted": "1", "unseen": [2], "more": 3})
    assert (task.unhinted, task.unseen, task.rest) == ("1", [2], {"more": 3})


def test_a_class_that_pydantic_cannot_look_into_may_be_a_hint(own: Path) -> None:
    holder = object()
    assert build(own, "Odd", args={"holder": holder}).holder is holder
    assert "it should be an instance of Opaque" in refusal(Recipe(task=f"{own}:Odd", args={"opaque": 3}))


def test_a_dataclass_may_be_a_task(own: Path) -> None:
    assert build(own, "AsDataclass", args={"hidden": "4"}).hidden == 4


def test_objects_of_a_file_can_be_sent_between_processes(own: Path) -> None:
    task = build(own, "Own", args={"hidden": 3})
    assert type(pickle.loads(pickle.dumps(task))) is type(task) is type(build(own, "Own", args={"hidden": 5}))


def test_two_files_of_one_name_do_not_meet(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "own.py"
    other.parent.mkdir()
    other.write_text(f"from samestep.tasks.base import Task\nclass Plain(Task):\n    other = True\n{METHODS}")
    assert build(other, "Plain").other
    assert not hasattr(build(own, "Plain"), "other")


def test_a_file_may_have_any_name(own: Path) -> None:
    odd = own.rename(own.with_name("my-task v1.2.py"))
    task = build(odd, "Plain")
    assert type(pickle.loads(pickle.dumps(task))) is type(task)


KNOWN = ", ".join(sorted(TASKS))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "regresion",
            f'recipe.task is "regresion"; did you mean "regression"? known: {KNOWN}, or path/to/file.py:ClassName',
        ),
        ("xyz", f'recipe.task is "xyz"; known: {KNOWN}, or path/to/file.py:ClassName'),
        ("own.py", f'recipe.task is "own.py"; known: {KNOWN}, or path/to/file.py:ClassName'),
        ("own.txt:Own", f'recipe.task is "own.txt:Own"; known: {KNOWN}, or path/to/file.py:ClassName'),
        ("nowhere/own.py:Own", "recipe.task: no file nowhere/own.py"),
        (Regression, f"recipe.task is {Regression!r}; it must be a name, file.py:ClassName or a samestep.Task"),
    ],
)
def test_an_unknown_task_is_refused_with_what_would_do(task: Any, expected: str) -> None:
    assert refusal(Recipe(task=task)) == expected


TASKS_THERE = "Plain, Own, WithData, MayHaveData, Loose, Odd, AsDataclass, Broken, Picky"


@pytest.mark.parametrize(
    ("name", "recipe", "expected"),
    [
        ("Onw", {}, f'recipe.task is "own.py:Onw": Onw is not in that file; tasks there: {TASKS_THERE}'),
        (
            "NoTask",
            {},
            f'recipe.task is "own.py:NoTask": NoTask is not a subclass of samestep.Task; tasks there: {TASKS_THERE}',
        ),
        (
            "TYPE_CHECKING",
            {},
            'recipe.task is "own.py:TYPE_CHECKING": TYPE_CHECKING is not a subclass of samestep.Task; '
            f"tasks there: {TASKS_THERE}",
        ),
        ("Partial", {}, 'recipe.task is "own.py:Partial": Partial must also have model(), train_set()'),
        (
            "Own",
            {"args": {"hiden": 3}},
            'unknown key "recipe.args.hiden"; did you mean "hidden"? known: hidden, names, rate',
        ),
        ("Plain", {"args": {"hidden": 3}}, 'unknown key "recipe.args.hidden"; known: nothing'),
        ("Own", {}, 'recipe.args.hidden is missing; task "own.py:Own" needs it'),
        ("Own", {"args": {"hidden": "many"}}, "recipe.args.hidden is 'many'; it should be a whole number"),
        (
            "Own",
            {"args": {"hidden": 1, "names": ["a", 2]}},
            "recipe.args.names.1 is 2; it should be text",
        ),
        ("AsDataclass", {"args": {"hidden": None}}, "recipe.args.hidden is empty; it should be a whole number"),
        ("Own", {"data": {"a": 1}}, 'recipe.data is given, but task "own.py:Own" takes no data'),
        ("Own", {"model": {"a": 1}}, 'recipe.model is given, but task "own.py:Own" takes no model'),
        ("WithData", {"args": {"data": {}}}, "recipe.args.data must stand one level higher, as recipe.data"),
        (
            "WithData",
            {"data": {"foldr": "x"}},
            'unknown key "recipe.data.foldr"; did you mean "folder"? known: folder, inner',
        ),
        (
            "MayHaveData",
            {"data": {"folder": "x", "inner": {"sise": 1}}},
            'unknown key "recipe.data.inner.sise"; did you mean "size"? known: size',
        ),
        (
            "WithData",
            {"data": {"folder": "x", "inner": {"size": "big"}}},
            "recipe.data.inner.size is 'big'; it should be a whole number",
        ),
        (
            "WithData",
            {"data": {"folder": "x"}, "model": {"layers": "two"}},
            "recipe.model.layers is 'two'; it should be a whole number",
        ),
        ("Picky", {"args": {"hidden": 1}}, "recipe.args.hidden is 1; use 7"),
    ],
)
def test_a_wrong_class_or_argument_is_refused_in_one_line(
    own: Path, name: str, recipe: dict[str, Any], expected: str
) -> None:
    assert refusal(Recipe(task=f"{own}:{name}", **recipe), own.parent) == expected


def test_a_task_that_fails_while_it_is_built_shows_its_traceback(own: Path) -> None:
    message = refusal(Recipe(task=f"{own}:Broken"), own.parent)
    assert message.startswith('task "own.py:Broken" failed while it was built: no luck\n')
    line = OWN.splitlines().index('        raise RuntimeError("no luck")') + 1
    assert f'File "own.py", line {line}, in __init__' in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\nimport no_such_module\n",
            "ModuleNotFoundError: No module named 'no_such_module', at own.py:2",
        ),
        ("x = 1\ndef broken(:\n", "SyntaxError: invalid syntax, at own.py:2"),
        ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero, at own.py:2"),
        ("import sys\nsys.exit(2)\n", "SystemExit: 2, at own.py:2"),
    ],
)
def test_a_file_that_fails_to_import_is_named_with_the_line_and_the_error(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    before = set(sys.modules)
    assert refusal(Recipe(task=f"{file}:Own"), tmp_path) == f"recipe.task: own.py fails to import: {expected}"
    assert not {name for name in set(sys.modules) - before if name.startswith("samestep_task_")}


def test_an_import_that_fails_inside_a_library_names_both_places(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import json\n\njson.loads('{')\n")
    message = refusal(Recipe(task=f"{file}:Own"), tmp_path)
    assert message.startswith("recipe.task: own.py fails to import: JSONDecodeError: Expecting property name")
    assert ", at own.py:3, raised at " in message
    assert "decoder.py:" in message
    assert "\n" not in message


def test_a_function_of_a_task_imports_its_neighbours_whatever_the_current_folder(tmp_path: Path) -> None:
    name = "neighbour_of_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text("NUMBER = 7\n", encoding="utf-8")
    file = tmp_path / "own.py"
    text = f"def late():\n    import {name}\n    return {name}.NUMBER\n"
    file.write_text(text, encoding="utf-8")
    before = list(sys.path)
    try:
        assert import_file(file).late() == 7
        assert sys.path == [*before, str(tmp_path)]  # at the end, where it hides no other module
    finally:
        sys.path[:] = before


def test_a_file_mended_after_a_failure_is_read_again(own: Path) -> None:
    own.write_text("import no_such_module\n")
    assert "no_such_module" in refusal(Recipe(task=f"{own}:Plain"))
    own.write_text(OWN + "# mended\n")
    assert type(build(own, "Plain")).__name__ == "Plain"
