"""Tasks that no file holds: typed at a prompt, in a notebook, by standard input. Told before any rank starts."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samestep.errors import UserError
from samestep.launch.pickled_calls import pickled

TASK = """
import torch, samestep
from torch import nn

class Points(samestep.Task):
    def model(self):
        return nn.Linear(3, 1)
    def train_set(self):
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(3, generator=generator), torch.randn(1, generator=generator)) for _ in range(16)]
    def loss(self, output, batch):
        return ((output - batch.targets) ** 2).sum(), len(output)
"""
TRAIN = """
samestep.train(
    samestep.Recipe(task=Points(), batch=8, steps=1), layout="LAYOUT", device="cpu", threads=1, log=(),
    check=False, folder="run",
)
"""
TOLD = "Points is defined in no file: ranks are processes of their own, which import it from a file; write it into"


def program(words: list[str], text: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], input=text, capture_output=True, text=True, timeout=100, check=False, cwd=place
    )


def cells(place: Path) -> list[str]:
    """A program that runs its cells as notebooks do: in a main module without a file."""
    (place / "cells.txt").write_text(TASK + TRAIN.replace("LAYOUT", "dp2"), encoding="utf-8")
    run = (
        "import __main__; vars(__main__).pop('__file__', None); "
        "exec(compile(open('cells.txt').read(), '<ipython-input-1>', 'exec'), vars(__main__))"
    )
    return ["-c", run]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "way", ["-", pytest.param("-c", marks=pytest.mark.slow), pytest.param("cells", marks=pytest.mark.slow)]
)
def test_a_class_that_no_file_holds_is_told_before_ranks_start(way: str, tmp_path: Path) -> None:
    text = TASK + TRAIN.replace("LAYOUT", "dp2")
    words = {"-": ["-"], "-c": ["-c", text], "cells": cells(tmp_path)}[way]
    done = program(words, text if way == "-" else "", tmp_path)
    assert done.returncode == 1
    assert TOLD in done.stderr.splitlines()[-1]
    assert "Can't get attribute" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_the_message_advises_works(tmp_path: Path) -> None:
    """One process needs no file, and ranks take the class from one."""
    (tmp_path / "my_task.py").write_text(TASK, encoding="utf-8")
    text = "from my_task import *\nimport samestep\n" + TRAIN.replace("LAYOUT", "dp2")
    text = 'if __name__ == "__main__":\n' + "\n".join(
        f"    {line}" for line in text.splitlines() if "import *" not in line
    )
    done = program(["-c", "from my_task import Points\n" + text], "", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run").is_dir()


def made(text: str, name: str, file: str, **values: Any) -> Any:
    """The class Own of a module that is made from a text."""
    module = ModuleType(name)
    vars(module).update(values)
    exec(compile(text, file, "exec"), vars(module))
    return vars(module)["Own"]


CLASS = "class Own:\n    def model(self):\n        return 1\n"


def nothing() -> None:
    """A function to call."""


@pytest.mark.quick
def test_a_module_that_is_in_memory_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = made(CLASS, "made_here", "<cell>")
    monkeypatch.setitem(sys.modules, "made_here", sys.modules.get("made_here") or ModuleType("made_here"))
    vars(sys.modules["made_here"])["Own"] = own
    with pytest.raises(
        UserError, match="Own is defined in module made_here, which this process has made and no file"
    ):
        pickled(nothing, (own(),))


@pytest.mark.quick
def test_a_class_of_a_prompt_beside_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """python -i program.py: the main module has a file, and the class isn't in it."""
    own = made(CLASS, "__main__", "<stdin>")
    main = ModuleType("__main__")
    vars(main).update(Own=own, __file__=__file__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(UserError, match="Own is defined in no file"):
        pickled(nothing, (own(),))
    from_file = made(CLASS, "__main__", __file__)
    vars(main)["Own"] = from_file
    assert pickled(nothing, (from_file(),))


@pytest.mark.quick
def test_classes_inside_functions_and_lambdas_are_told_as_before() -> None:
    class Inner:
        pass

    for value in (Inner(), lambda: 0):
        with pytest.raises(
            UserError, match=r"can't be sent to the ranks: .*; define its class at the top level of a mod"
        ):
            pickled(nothing, (value,))


@pytest.mark.quick
def test_what_files_hold_is_sent() -> None:
    import json

    assert pickled(nothing, (json.JSONEncoder(), Path("x"), [Path], {"a": nothing}))
