"""A change of the user's code is told, in whichever file it stands; comments and others' code are no change."""

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint.code import code_of
from samestep.tasks.registry import import_file
from samestep.tasks.regression import Regression

pytestmark = pytest.mark.quick

FILES = {
    "task.py": '''
"""A task."""
import math

import numpy as np
import torch
from torch import nn

import samestep
from nets import small
import losses.whole


class Net(samestep.Task):
    """Its net."""

    def model(self):
        return small()

    def train_set(self):
        return [(torch.ones(2), 1)] * 4

    def loss(self, output, batch):
        from later import factor

        return factor * losses.whole.summed(output, batch.targets), len(output)
''',
    "nets.py": "from torch import nn\n\ndef small():\n    return nn.Sequential(nn.Linear(2, 4), nn.GELU())\n",
    "losses/__init__.py": "",
    "losses/whole.py": "from .parts import part\n\ndef summed(output, y):\n    return part(output, y).sum()\n",
    "losses/parts.py": "def part(output, targets):\n    return (output - targets) ** 2\n",
    "later.py": "factor = 1\n",
    "unused.py": "x = 1\n",
}
OWN = ("nets", "losses", "later")


def written(folder: Path, **changed: Callable[[str], str]) -> Path:
    """The files in a folder, with changes by the file's name; any characters but letters are underscores in it."""
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        change = changed.get("".join(letter if letter.isalpha() else "_" for letter in name), str)
        file.write_text(change(text), encoding="utf-8")
    return folder / "task.py"


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    """Modules of the same name in other folders are imported for each test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in OWN:
            del sys.modules[name]


def code(file: Path) -> dict[str, str]:
    for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return code_of([import_file(file).Net()])


def replace(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


CHANGES: dict[str, tuple[dict[str, Callable[[str], str]], list[str]]] = {
    "nothing": ({}, []),
    "a comment": ({"task_py": lambda text: "# Two.\n" + text.replace("small()\n", "small()  # a net\n")}, []),
    "a docstring": ({"task_py": replace("Its net.", "Its small net.")}, []),
    "layout": ({"nets_py": replace("nn.GELU()", "\n        nn.GELU(),\n    ")}, []),
    "a file that nothing imports": ({"unused_py": replace("1", "2")}, []),
    "the loss doubled": ({"task_py": replace("return factor", "return 2 * factor")}, ["task.py"]),
    "another activation": ({"nets_py": replace("GELU", "ReLU")}, ["nets.py"]),
    "a package's module": ({"losses_whole_py": replace("sum()", "mean()")}, ["losses/whole.py"]),
    "a relative import": ({"losses_parts_py": replace("** 2", "** 4")}, ["losses/parts.py"]),
    "an import in a function": ({"later_py": replace("1", "2")}, ["later.py"]),
    "a text that is no docstring": (
        {"task_py": replace("[(torch.ones(2), 1)]", "[(torch.ones(2), '1')]")},
        ["task.py"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_files(tmp_path: Path, name: str) -> None:
    changed, files = CHANGES[name]
    before, now = code(written(tmp_path / "before")), code(written(tmp_path / "now", **changed))
    assert before.keys() == now.keys() == {file for file in FILES if file != "unused.py"}
    assert [file for file in before if before[file] != now[file]] == files


def test_code_of_packages_is_not_the_users() -> None:
    assert code_of([Regression(), nn.Linear(1, 1), torch.sum, samestep.train]) == {}


def test_a_file_that_can_not_be_parsed_counts_by_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def", encoding="utf-8")
    before = code_of([], [file])
    file.write_text("class", encoding="utf-8")
    assert code_of([], [file]) != before
    file.write_text("x = " + "-" * 5000 + "1", encoding="utf-8")
    assert code_of([], [file])["broken.py"]


def test_the_arguments_of_train_are_compared_as_a_job_not_as_code(tmp_path: Path) -> None:
    found = []
    for arguments in ("steps=3", "steps=4, checkpoint={'resume': 'auto'}"):
        file = tmp_path / "script.py"
        file.write_text(
            f"import samestep\nsamestep.train(samestep.Recipe(task='t', {arguments}))\n", encoding="utf-8"
        )
        found.append(code_of([], [file]))
    assert found[0] == found[1]


NOTEBOOK = """
import torch
class Net(torch.nn.Module):
    '''Doubles.'''
    def forward(self, values):
        return FACTOR * values  # a comment
"""


def notebook(text: str, *, known: bool) -> Any:
    """A class of a notebook's cell, or of standard input, whose text Python doesn't know."""
    name = f"<cell {hash(text)} {known}>"
    if known:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType("__main__")
    exec(compile(text, name, "exec"), vars(module))
    vars(module)["Net"].__module__ = "no_such_module"
    return vars(module)["Net"]


@pytest.mark.parametrize("known", [True, False])
def test_a_class_of_a_notebook_has_the_code_of_its_methods(known: bool) -> None:
    before = code_of([notebook(NOTEBOOK, known=known)()])
    assert before.keys() == {"class Net"}
    assert code_of([notebook(NOTEBOOK.replace("comment", "remark"), known=known)()]) == before
    changed = code_of([notebook(NOTEBOOK.replace("FACTOR * values", "FACTOR * values * 2"), known=known)()])
    assert changed["class Net"] != before["class Net"]
