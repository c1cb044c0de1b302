"""A function call as bytes for the ranks of this host, and what of it they could not import.

A rank is a process of its own. A pickle has classes and functions by their names alone, and a rank imports them from
files: what was typed at a prompt, stands in a cell of a notebook or came in by standard input is not there.
"""

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from samestep.errors import UserError

_MAIN = "__main__"
_TO_DO = (
    "ranks are processes of their own, which import it from a file; write it into one, such as my_task.py (in a "
    "notebook by the first line %%writefile my_task.py of its cell), and import it from there"
)


def pickled(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Pickle a call. Raises UserError where that can't be done, and where a rank could not load it."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump((function, tuple(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"a task or engine object can't be sent to the ranks: {error}; "
            "define its class at the top level of a module, and open files and models in its methods"
        ) from None
    except RecursionError:
        raise UserError(
            "a task or engine object can't be sent to the ranks: its values are nested too deep; make them in its "
            "methods"
        ) from None
    for named in pickler.named.values():
        if (where := _where_no_rank_looks(named)) is not None:
            raise UserError(f"{named.__qualname__} {where}: {_TO_DO}")
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Notes the classes and functions that stand in the pickle by their names."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.named: dict[int, type[Any] | FunctionType] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            self.named[id(value)] = value
        return NotImplemented


def _where_no_rank_looks(named: type[Any] | FunctionType) -> str | None:
    """Where a class or function is defined, if no rank can import it from there."""
    name = named.__module__
    if name == _MAIN:
        return None if _main_has_a_file() and _stands_in_a_file(named) else "is defined in no file"
    if name not in sys.modules or _findable(name):
        return None
    return f"is defined in module {name}, which this process has made and no file holds"


def _main_has_a_file() -> bool:
    """Whether ranks can import the program again, from its file or by its name."""
    main = sys.modules[_MAIN]
    if getattr(main, "__spec__", None) is not None:  # of python -m
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).is_file()


def _stands_in_a_file(named: type[Any] | FunctionType) -> bool:
    """Whether any code of a class or function came from a file, as far as it has code."""
    files = {code.co_filename for code in _codes(named)}
    return not files or any(Path(file).is_file() for file in files)


def _codes(named: type[Any] | FunctionType) -> Iterator[CodeType]:
    functions = vars(named).values() if isinstance(named, type) else (named,)
    for function in functions:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and not code.co_filename.startswith("<string>"):  # dataclasses make such
            yield code


def _findable(name: str) -> bool:
    """Whether a new process with this one's path finds a module."""
    parent = name.rpartition(".")[0]
    places = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and places is None:
        return False
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(name, places) is not None:
            return True
    return False
