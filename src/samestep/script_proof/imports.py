"""What a script imports from installed packages, read from its text and that of the modules beside it."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

_MOST_FILES = 200  # of the script's own that are read


def imports_of(command: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Installed modules, with the names that are taken from each; those of a script's own are followed."""
    names_by_module: dict[str, dict[str, None]] = {}
    for module, names in _all_imports(command):
        if module.partition(".")[0] not in sys.stdlib_module_names:
            names_by_module.setdefault(module, {}).update(dict.fromkeys(names))
    return [(module, tuple(names)) for module, names in names_by_module.items()]


def _all_imports(command: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The imports of a script and of its own modules, but for those of its own modules."""
    files, folders = _first(command)
    seen: set[Path] = set()
    own_files = cache(partial(_own, folders))  # most files of a project import the same ones
    while files and len(seen) < _MOST_FILES:
        file = files.pop(0)
        if file in seen:
            continue
        is_first = not seen
        seen.add(file)
        for module, names in _imports(file, called=is_first):
            own = [file for name in [module, *(f"{module}.{name}" for name in names)] for file in own_files(name)]
            files += (file for file in own if file not in seen)
            if not own:
                yield module, names


def starts_processes(command: Sequence[str]) -> bool:
    """Whether a script, or a module of its own, imports what starts processes: it may start its ranks itself."""
    return any("multiprocessing" in (*module.split("."), *names) for module, names in _all_imports(command))


def _first(command: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The file that a command runs, and the folders from which it imports modules of its own."""
    if command[0] != "-m":
        file = Path(command[0]).resolve()
        return [file], [file.parent]
    for name in (f"{command[1]}.__main__", command[1]):
        with suppress(ImportError, ValueError, AttributeError):  # a module that is no package has no __main__
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
                return [Path(spec.origin)], [Path.cwd()]
    return [], [Path.cwd()]


def _own(folders: Sequence[Path], name: str) -> list[Path]:
    """The files of a module that lies beside the script."""
    places = [folder.joinpath(*name.split(".")) for folder in folders]
    tries = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in tries if path.is_file() and "site-packages" not in path.parts]


def _imports(file: Path, *, called: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The imports at the beginning of a file: none of those that wait for a condition.

    `called`: and those at the beginning of the functions that the file itself calls, as scripts have them that want
    to print their help at once.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):  # the script itself says so
        return
    functions = _called(tree) if called else []
    for node in [*tree.body, *(statement for function in functions for statement in function.body)]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module, tuple(alias.name for alias in node.names if alias.name != "*")


def _called(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of a module that its own statements name, or functions that these name."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reached: dict[str, ast.FunctionDef] = {}
    statements: list[ast.AST] = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    while statements:
        names = {node.id for node in ast.walk(statements.pop(0)) if isinstance(node, ast.Name)}
        new = [name for name in functions if name in names and name not in reached]
        reached |= {name: functions[name] for name in new}
        statements += [functions[name] for name in new]
    return list(reached.values())


def import_early(imports: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Import what can be imported; what fails is left for the script, which may handle it."""
    for module, names in imports:
        try:
            imported = importlib.import_module(module)
            for name in names:
                getattr(imported, name, None)  # transformers imports a module when its name is asked for
        except Exception:
            continue
