"""What a user's task imports, and takes seconds, is imported once, before its ranks are forked."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import samestep
from samestep.job import Job
from samestep.rank_imports import rank_imports

pytestmark = pytest.mark.quick

TRANSFORMERS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("files", "imported"),
    [
        ({"task.py": "from torchmetrics.classification import F1Score"}, ["torchmetrics"]),
        ({"task.py": "import os, transformers as tf"}, [TRANSFORMERS]),
        ({"task.py": "from models import Net", "models.py": "from transformers import BertModel"}, [TRANSFORMERS]),
        ({"task.py": "import one", "one.py": "import task, two", "two.py": "import torchmetrics"}, ["torchmetrics"]),
        ({"task.py": "def late():\n    import torchmetrics"}, []),
        ({"task.py": "import torch", "other.py": "import torchmetrics"}, []),
        ({"task.py": "from . import torchmetrics"}, []),
        ({"task.py": "import torchmetrics\ndef model(:"}, []),
        ({"task.py": "import torchmetrics\0"}, []),
        ({"task.py/inner.py": "import torchmetrics"}, []),
        ({}, []),
    ],
)
def test_what_a_task_imports_itself_or_by_files_beside_it(
    files: Mapping[str, str], imported: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    job = Job(recipe=samestep.Recipe(task=f"{tmp_path}/task.py:Own"))
    assert rank_imports(job) == imported


def test_so_many_files_beside_one_another_take_no_time(tmp_path: Path) -> None:
    names = [f"part_{number}" for number in range(2000)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"import {', '.join(names)}", encoding="utf-8")
    assert rank_imports(Job(recipe=samestep.Recipe(task=f"{tmp_path}/part_0.py:Own"))) == []
