"""From a recipe to its task object: finds the class, checks the arguments against its signature, builds it."""

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from samestep.errors import UserError
from samestep.extras import EXTRAS, how_to_install, need
from samestep.input_files import short_path, wrong_path
from samestep.limits import divisors
from samestep.recipe import Recipe
from samestep.tasks import PACKAGES, TASKS
from samestep.tasks.base import Task
from samestep.validation import check_keys, closest, explain

# Sections of a recipe that are handed over whole, where the class takes an argument of that name.
_SECTIONS = ("data", "model")


def resolve(recipe: Recipe, facts: Any = None) -> Task:
    """Build the task that a recipe names. Raises UserError for what is wrong with the name or its arguments.

    `facts`: what another process has found by trying the task's model (`Task.tried_facts`), None: nothing.
    """
    task = _built(recipe)
    if facts is not None:
        task.take_facts(facts)
    return task


def _built(recipe: Recipe) -> Task:
    """The task object that a recipe has, or one of the class that it names."""
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
    """The class that `recipe.task` names. Raises UserError for none, or for one with methods missing."""
    if name in TASKS:
        need(f"task {name}", *PACKAGES.get(name, ()))
        return pkgutil.resolve_name(TASKS[name])
    file, separator, class_name = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise UserError(f'recipe.task is "{name}"; {closest(name, TASKS)}, or path/to/file.py:ClassName')
    module = import_file(Path(file))
    task_class = getattr(module, class_name, None)
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        what = "is not a subclass of samestep.Task" if task_class is not None else "is not in that file"
        there = [key for key, value in vars(module).items() if _is_whole_task(value)]
        raise UserError(f'recipe.task is "{name}": {class_name} {what}; tasks there: {", ".join(there) or "none"}')
    if inspect.isabstract(task_class):
        lacking = ", ".join(f"{method}()" for method in sorted(task_class.__abstractmethods__))
        raise UserError(f'recipe.task is "{name}": {class_name} must also have {lacking}')
    return task_class


def _is_whole_task(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and not inspect.isabstract(value)


def find_callable(
    name: Any, key: str, what: str, candidate: Callable[[Any], bool] = inspect.isfunction
) -> Callable[..., Any]:
    """The class or function that a key names by "package.name", "package:name" or "file.py:name", or gives itself.

    `what`: what the name should be, and `candidate`: which values of the module messages may propose. Raises
    UserError if there is none.
    """
    if not isinstance(name, str):
        return name
    place, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not place:
        raise UserError(f'{key} is "{name}"; use {what}')
    if place.endswith(".py"):
        module: Any = import_file(Path(place), key)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(f'{key} is "{name}", and {place} can\'t be imported: {error}; use {what}') from None
    value = getattr(module, attribute, None)
    if value is None or not callable(value):
        there = [key for key, value in vars(module).items() if candidate(value)]
        raise UserError(f'{key} is "{name}": {attribute} is not in {place}; {closest(attribute, there)}')
    return value


def import_file(path: Path, key: str = "recipe.task") -> ModuleType:
    """The module of a user's file. Raises UserError, about the key that names it, where it can't be imported."""
    if wrong := wrong_path(str(path)):
        raise UserError(f"{key} is {short_path(str(path))!r}: {wrong}")
    if not path.is_file():
        raise UserError(f"{key}: no file {path}")
    # A name of its own for every path, so that two files called task.py don't meet; and the same name in
    # every process, so that objects of its classes can be sent between processes.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"samestep_task_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _folder_on_path(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise UserError(
            f"{key}: {path} fails to import: {what}, at {_line_of(error, path)}{_install(error)}"
        ) from error
    return module


def _install(error: BaseException) -> str:
    """The command that installs the package that an import has missed, if samestep has an extra for it."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"; {how_to_install(package)}" if package in EXTRAS else ""


@contextmanager
def _folder_on_path(path: Path) -> Iterator[None]:
    """Put a task's folder on sys.path, so that its file imports its neighbours as a script does.

    While the file is imported the folder stands first. Then it stays at the end, for imports inside functions: there
    it hides no module of another name that PyTorch imports late.
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def _line_of(error: BaseException, path: Path) -> str:
    """Return the line of the user's file in which an import failed, and where the error was raised if elsewhere."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    own = [frame for frame in frames if frame[0] == str(path)] or frames
    (file, line), (raised_in, raised_at) = own[-1], frames[-1]
    return f"{file}:{line}" + ("" if own[-1] == frames[-1] else f", raised at {raised_in}:{raised_at}")


def arguments_of(task_class: type[Task], recipe: Recipe) -> dict[str, Any]:
    """Collect the arguments of a task's class from a recipe, each checked against its type hint.

    An argument without a type hint, or with one that only type checkers see, is handed over as it is.
    """
    parameters = {} if task_class.__init__ is object.__init__ else dict(inspect.signature(task_class).parameters)
    hints = hints_of(task_class.__init__)
    places: dict[str, tuple[str, Any]] = {}  # argument -> where it stands, value
    for section in _SECTIONS:
        value = getattr(recipe, section)
        if section in recipe.args:
            raise UserError(f"recipe.args.{section} must stand one level higher, as recipe.{section}")
        if section in parameters and (value or parameters[section].default is inspect.Parameter.empty):
            places[section] = (f"recipe.{section}", value)
        elif value and section not in parameters:
            raise UserError(f'recipe.{section} is given, but task "{recipe.task}" takes no {section}')
    places |= {name: (f"recipe.args.{name}", value) for name, value in recipe.args.items()}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, (where, _) in places.items():
        if name not in parameters and not takes_any:
            raise UserError(f'unknown key "{where}"; {closest(name, parameters)}')
    for name, parameter in parameters.items():
        optional = parameter.default is not inspect.Parameter.empty or parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if name not in places and not optional:
            raise UserError(f'recipe.args.{name} is missing; task "{recipe.task}" needs it')
    return {name: checked_value(value, hints.get(name), where) for name, (where, value) in places.items()}


def hints_of(function: Any) -> dict[str, Any]:
    """Return the type hints of a function; empty if they can't be resolved."""
    if function is object.__init__:
        return {}
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:  # a name that is imported under `if TYPE_CHECKING`
        return {}


def checked_value(value: Any, hint: Any, where: str) -> Any:
    """A value as its type hint wants it. Raises UserError, about the key `where`, for one that does not fit."""
    if hint is None:
        return value
    check_keys(value, hint, where)
    try:
        adapter = TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        try:
            adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticUserError:  # a class of the user's own that pydantic can't look into
            return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise UserError(explain(error, value, hint, prefix=tuple(where.split(".")))) from None


def refuse_together(arguments: Any, key: str, others: Sequence[str], reason: str) -> Any:
    """For a "before" validator: raise ValueError where `key` is given with one of `others`, else return all.

    Only here can a value that the user gave be distinguished from a default.
    """
    values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
    if isinstance(values, Mapping) and values.get(key) is not None:
        for other in others:
            if values.get(other) is not None:
                raise ValueError(f"{key} and {other} are both given; {other} {reason}")
    return arguments


def check_heads(hidden: int, heads: int) -> None:
    """For an "after" validator: raise ValueError where the hidden size can't be divided among the heads."""
    if hidden % heads:
        fitting = [str(count) for count in divisors(hidden)]
        raise ValueError(
            f"hidden is {hidden} and heads is {heads}, which doesn't divide it; use heads of {', '.join(fitting)}"
        )
