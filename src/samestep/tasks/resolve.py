"""From a recipe to its task object: find the class, check the arguments against its signature, build it."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.tasks import TASKS
from samestep.tasks.base import Task
from samestep.validation import closest, explain

# Sections of a recipe that are handed over whole, where the class takes an argument of that name.
_SECTIONS = ("data", "model")


def resolve(recipe: Recipe) -> Task:
    """Build the task that a recipe names. Raises UserError for what is wrong with the name or its arguments."""
    if isinstance(recipe.task, Task):
        for section in (*_SECTIONS, "args"):
            if getattr(recipe, section):
                raise UserError(f"recipe.{section} is given, but recipe.task is already a task object")
        return recipe.task
    if not isinstance(recipe.task, str):
        raise UserError(f"recipe.task is {recipe.task!r}; it must be a name, file.py:ClassName or a samestep.Task")
    task_class = _find_class(recipe.task)
    arguments = arguments_of(task_class, recipe)
    try:
        return task_class(**arguments)
    except UserError:
        raise
    except Exception as error:
        where = traceback.format_exc().rstrip()
        raise UserError(f'task "{recipe.task}" failed while it was built: {error}\n{where}') from error


def _find_class(name: str) -> type[Task]:
    if name in TASKS:
        module_name, _, class_name = TASKS[name].partition(":")
        return getattr(importlib.import_module(module_name), class_name)
    file, separator, class_name = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise UserError(f'recipe.task is "{name}"; {closest(name, TASKS)}, or path/to/file.py:ClassName')
    module = _import_file(Path(file))
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "is not a subclass of samestep.Task" if found is not None else "is not in that file"
        there = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        raise UserError(f'recipe.task is "{name}": {class_name} {what}; tasks there: {", ".join(there) or "none"}')
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"recipe.task: no file {path}")
    # A name of its own for every path, so that two files called task.py don't meet; and the same name in
    # every process, so that objects of its classes can be sent between processes.
    name = f"samestep_task_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{last.filename}:{last.lineno}"
        if isinstance(error, SyntaxError):
            at = f"{error.filename}:{error.lineno}"
        raise UserError(f"recipe.task: {path} fails to import: {type(error).__name__}: {error}\n  at {at}") from error
    return module


def arguments_of(task_class: type[Task], recipe: Recipe) -> dict[str, Any]:
    """The arguments that a recipe gives a task's class, each checked against its type hint."""
    parameters = {} if task_class.__init__ is object.__init__ else dict(inspect.signature(task_class).parameters)
    hints = {} if task_class.__init__ is object.__init__ else get_type_hints(task_class.__init__, include_extras=True)
    given: dict[str, tuple[str, Any]] = {}  # argument -> where it stands, value
    for section in _SECTIONS:
        value = getattr(recipe, section)
        if section in parameters:
            given[section] = (f"recipe.{section}", value)
        elif value:
            raise UserError(f'recipe.{section} is given, but task "{recipe.task}" takes no {section}')
    given |= {name: (f"recipe.args.{name}", value) for name, value in recipe.args.items()}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, (where, _) in given.items():
        if name not in parameters and not takes_any:
            raise UserError(f'unknown key "{where}"; {closest(name, parameters)}')
    for name, parameter in parameters.items():
        optional = parameter.default is not inspect.Parameter.empty or parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if name not in given and not optional:
            raise UserError(f'recipe.args.{name} is missing; task "{recipe.task}" needs it')
    return {name: _checked(value, hints.get(name), where) for name, (where, value) in given.items()}


def _checked(value: Any, hint: Any, where: str) -> Any:
    if hint is None:
        return value
    try:
        adapter = TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        plain = value if isinstance(value, Mapping) else {}
        raise UserError(explain(error, plain, hint, prefix=tuple(where.split(".")))) from None
