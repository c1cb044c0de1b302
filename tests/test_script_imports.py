"""What a script imports, read before it runs: at the beginning, and in the functions that it calls."""

from pathlib import Path

import pytest

from samestep.script_proof.imports import imports_of, starts_processes

SCRIPT = """
import json
import numpy
from beside import helper

def parser():
    from transformers import HfArgumentParser, set_seed
    return HfArgumentParser

def inner():
    import datasets

def main():
    import torch.nn
    if helper():
        import wandb
    try:
        import apex
    except ImportError:
        pass
    inner()

def never():
    import tensorflow

def launched(rank):
    from torch import multiprocessing

class Model:
    def forward(self):
        import einops

if __name__ == "__main__":
    parser()
    main()
"""


def modules(folder: Path, text: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    (folder / "beside.py").write_text("import scipy\ndef helper():\n    import pandas\n", encoding="utf-8")
    return [module for module, _ in imports_of((str(script),))]


def test_imports_of_functions_that_are_called_are_read_and_no_others(tmp_path: Path) -> None:
    assert modules(tmp_path, SCRIPT) == ["numpy", "transformers", "torch.nn", "datasets", "scipy"]
    (names,) = [names for module, names in imports_of((str(tmp_path / "train.py"),)) if module == "transformers"]
    assert names == ("HfArgumentParser", "set_seed")


def test_a_function_that_is_handed_on_is_called(tmp_path: Path) -> None:
    text = SCRIPT.replace("    main()\n", "    spawn(launched)\n")
    assert modules(tmp_path, text) == ["numpy", "transformers", "torch", "scipy"]
    assert starts_processes((str(tmp_path / "train.py"),))


def test_a_module_and_a_package_are_read_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack_of_imports"
    package.mkdir()
    for name, text in (("__init__", ""), ("train", "import numpy\n"), ("__main__", "import scipy\n")):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert imports_of(("-m", "pack_of_imports.train", "--steps", "3")) == [("numpy", ())]
    assert imports_of(("-m", "pack_of_imports")) == [("scipy", ())]
