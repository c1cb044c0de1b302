"""Each extra may stay away: what doesn't need it runs, and what does names the command that installs it."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_recipes import recipe

import samestep
from samestep.extras import EXTRAS, is_installed

# One process for all, as an import of PyTorch takes longer than the rest: it hides all extras, then one at a time.
PROGRAM = """
import contextlib, io, json, sys
from importlib import metadata
from pathlib import Path

class Hidden:
    names = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = Hidden()
sys.meta_path.insert(0, hidden)
from_name = metadata.Distribution.from_name

def visible(name):
    if name in hidden.names:
        raise metadata.PackageNotFoundError(name)
    return from_name(name)

metadata.Distribution.from_name = staticmethod(visible)  # `importlib.metadata.version` asks it
from samestep.cli.main import main

told = {}
for name, (away, words) in json.loads(Path(sys.argv[1]).read_text()).items():
    hidden.names = set(away)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    told[name] = [code, said.getvalue(), sorted(set(away) & {module.partition(".")[0] for module in sys.modules})]
Path(sys.argv[2]).write_text(json.dumps(told))
"""

JOBS = {
    "regression": "recipe: {task: regression, args: {samples: 32}, batch: 8, steps: 2}",
    "text": "recipe: {task: text-classification, data: {source: reviews}, batch: 8, steps: 1}",
    "language": "recipe: {task: causal-lm, data: {source: shakespeare}, batch: 8, steps: 1}",
    "own": "recipe: {task: own.py:Own, batch: 8, steps: 1}",
    "huggingface": "recipe: {task: loss.py:Loss, batch: 8, steps: 1}",
}
FILES = {
    "own.py": "import torchmetrics\n\nimport samestep\n\nclass Own(samestep.Task): ...\n",
    "loss.py": """from samestep.tasks import HuggingFace

class Loss(HuggingFace):
    def __init__(self) -> None:
        super().__init__(model=None, data=[])
""",
}
ALL = [*EXTRAS, "packaging"]  # the last one for samestep doctor


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The exit code, the output and the loaded modules among the hidden ones, of each command."""
    place = tmp_path_factory.mktemp("extras")
    for name, text in JOBS.items():
        run = f"\nrun: {{device: cpu, threads: 1, check: false, folder: {place / 'runs' / name}}}\n"
        (place / f"{name}.yaml").write_text(text + run, encoding="utf-8")
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    trainings = {name: ["train", str(place / f"{name}.yaml")] for name in JOBS}
    commands = {
        **{name: (ALL, words) for name, words in trainings.items()},
        "board": (["tensorboard"], [*trainings["regression"], "--force", "--set", "run.log=[tensorboard]"]),
        "metrics": (["torchmetrics"], trainings["own"]),
        "transformers": (["transformers"], trainings["text"]),
        "tokenizers": (["tokenizers"], trainings["language"]),
    }
    (place / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    words = [sys.executable, "-c", PROGRAM, str(place / "commands.json"), str(place / "told.json")]
    subprocess.run(words, check=True, timeout=150, cwd=place)
    assert not (place / "runs" / "regression" / "tensorboard").exists()
    return json.loads((place / "told.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(170)
def test_a_job_runs_without_any_extra(told: dict[str, Any]) -> None:
    code, text, loaded = told["regression"]
    assert code == 0, text
    assert loaded == []


OF_TEXT = r"transformers and tokenizers, which are not installed; use pip install \"samestep\[text\]\""
OF_METRICS = r"own\.py fails to import: .*'torchmetrics', at .*; use pip install \"samestep\[metrics\]\""


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text", f"task text-classification needs {OF_TEXT}"),
        ("language", f"task causal-lm needs {OF_TEXT}"),
        (
            "huggingface",
            r"HuggingFace needs transformers, which is not installed; use .*\[text\]",
        ),
        ("own", OF_METRICS),
        ("metrics", OF_METRICS),
        (
            "board",
            r"run\.log: \[tensorboard\] needs tensorboard, which is not installed; use .*board\]",
        ),
        ("transformers", r"task text-classification needs transformers, which is not installed; use .*\[text\]"),
        ("tokenizers", r"task causal-lm needs tokenizers, which is not installed; use .*\[text\]"),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(told: dict[str, Any], name: str, said: str) -> None:
    code, text, _ = told[name]
    assert code == 2, text
    assert re.search(said, " ".join(text.split())), text


@pytest.mark.skipif(is_installed("horovod"), reason="needs an environment without Horovod")
def test_a_folder_without_code_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()  # such as one of its configurations, beside the job
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("horovod") is not None  # Python would import it, as a namespace
    with pytest.raises(samestep.UserError, match='engine "horovod" needs horovod, which is not installed'):
        samestep.verify(recipe(), layout="dp2", engine="horovod", device="cpu")
