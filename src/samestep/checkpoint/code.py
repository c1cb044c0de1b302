"""The user's own source code that a training runs: a hash of each file, in which comments and layout don't count.

The files are those of the task's, the model's and the loss's classes and functions, and the files of the user that
these import: not installed packages, the standard library or samestep. A class of a notebook has the source of its
methods.
"""

import ast
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_FILES = 500
_MOST_BYTES = 1 << 22  # of a file
_INSTALLED = {"site-packages", "dist-packages"}
# Where Python and samestep lie.
_NOT_THE_USERS = (Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parent.parent)


def code_of(objects: Iterable[Any], files: Iterable[Path] = ()) -> dict[str, str]:
    """The hash of each file of the user's code that classes, functions, modules and objects come from.

    `files`: further ones. A name is relative to the first file's folder, so that it doesn't depend on where that is.
    """
    modules: dict[Path, ModuleType | None] = {}
    elsewhere: dict[str, str] = {}  # code without a file
    for object_ in objects:
        for kind in _kinds_of(object_):
            module = object_ if isinstance(object_, ModuleType) else sys.modules.get(kind.__module__)
            file = _users_file(module)
            if file is not None:
                modules.setdefault(file, module)
            elif getattr(module, "__name__", "__main__") == "__main__":
                elsewhere |= _without_file(kind)
    for file in files:
        modules.setdefault(file.resolve(), None)
    reached = _reached(modules)
    folder = next(iter(reached)).parent if reached else Path()
    return {_name_in(folder, file): digest for file, digest in reached.items()} | elsewhere


def _kinds_of(value: Any) -> Iterator[Any]:
    """The classes and functions whose code an object is made of: its own, those of its bases and attributes."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, ModuleType):
        yield value
    elif inspect.isfunction(value) or inspect.ismethod(value):
        yield inspect.unwrap(getattr(value, "__func__", value))
    elif isinstance(value, type):
        yield from (base for base in value.__mro__ if base is not object)
    else:
        yield from _kinds_of(type(value))


def _users_file(module: Any) -> Path | None:
    """The source file of a module of the user's; None for one that is installed, or has none."""
    name = getattr(module, "__file__", None)
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    file = Path(name).resolve()
    if _INSTALLED & set(file.parts) or any(file.is_relative_to(place) for place in _NOT_THE_USERS):
        return None
    return file if file.is_file() else None


def _reached(modules: Mapping[Path, ModuleType | None]) -> dict[Path, str]:
    """The hash of each file, and of those that they import, files of the user all."""
    waiting, hashes = list(modules.items()), dict[Path, str]()
    while waiting and len(hashes) < _MOST_FILES:
        file, module = waiting.pop(0)
        if file in hashes:
            continue
        try:
            raw = file.read_bytes()[:_MOST_BYTES]
        except OSError:
            continue
        try:
            tree = ast.parse(raw)
            hashes[file] = _digest(tree)
        except (SyntaxError, ValueError, RecursionError):
            hashes[file] = hashlib.sha256(raw).hexdigest()[:32]
            continue
        waiting += _imported(tree, file, module)
    return hashes


def _imported(tree: ast.Module, file: Path, module: ModuleType | None) -> Iterator[tuple[Path, ModuleType | None]]:
    """The files of the user that a file imports, at its top or inside its functions."""
    package = getattr(module, "__package__", None) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if node.level and package else []
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        # The packages that a module is in are imported as well.
        for package in dict.fromkeys(
            before for name in names for before in accumulate(name.split("."), "{}.{}".format)
        ):
            yield from _files_of(package, file.parent)


def _files_of(name: str, folder: Path) -> Iterator[tuple[Path, ModuleType | None]]:
    """The file of a module, if it is the user's: of the imported one, or the one that `folder` has for the name."""
    if not name:
        return
    if name in sys.modules:
        module = sys.modules[name]
        if (file := _users_file(module)) is not None:
            yield file, module
        return
    place = folder.joinpath(*name.split("."))
    for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if file.is_file():
            yield file.resolve(), None


def _name_in(folder: Path, file: Path) -> str:
    """The name of a file relative to a folder; of one outside of it the last three parts of its path."""
    if file.is_relative_to(folder):
        return file.relative_to(folder).as_posix()
    return "/".join(file.parts[-3:])


def _without_file(kind: Any) -> dict[str, str]:
    """The hash of a class's or a function's source where it has no file: of a notebook, or of standard input."""
    members = vars(kind).values() if isinstance(kind, type) else (kind,)
    functions = [getattr(member, "__func__", member) for member in members]
    parts = [_source(function) for function in functions if inspect.isfunction(function)]
    if not parts:
        return {}
    name = f"{'class' if isinstance(kind, type) else 'function'} {kind.__qualname__}"
    return {name: hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]}


def _source(function: Any) -> str:
    """The hash of a function's source, or its compiled code where Python doesn't know the source."""
    try:
        return _digest(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        code = function.__code__
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        constants = [const for const in code.co_consts if isinstance(const, (int, float, complex, str, bytes))]
        return f"{version} {code.co_code.hex()} {code.co_names} {constants}"


def _digest(tree: ast.AST) -> str:
    """The hash of a syntax tree without its docstrings."""
    return hashlib.sha256("".join(_words(tree)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


_OF_LAYOUT = ("ctx", "kind", "type_comment", "type_ignores")  # fields that say nothing of what a tree does


def _words(node: Any) -> Iterator[str]:
    """A syntax tree as text: not `ast.dump`, which each version of Python writes in its own way."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field, value in () if _is_start_of_training(node) else ast.iter_fields(node):
            if value is None or value == [] or field in _OF_LAYOUT:
                continue
            yield f" {field}="
            yield from _words(_without_docstring(node, value) if field == "body" else value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for child in node:
            yield from _words(child)
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r};"


def _without_docstring(node: ast.AST, body: Any) -> Any:
    """The statements of a module, a class or a function, without a text that only describes it."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not body:
        return body
    value = body[0].value if isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(value, ast.Constant) and isinstance(value.value, str) else body


def _is_start_of_training(node: ast.AST) -> bool:
    """Whether a node is a call of `samestep.train`, whose arguments are the job, which is compared by itself."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "train"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "samestep"
    )
