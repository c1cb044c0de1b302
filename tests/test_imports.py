"""What a training imports: nothing large that its job has no use for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

UNUSED = {
    "torchmetrics",
    "transformers",
    "scipy",
    "sklearn",
    "pandas",
    "plotly",
    "matplotlib",
    "accelerate",
    "deepspeed",
}

JOBS = {
    "regression": "task: regression\n  args: {samples: 64, held_out: 16}",
    "digits": "task: image-classification\n  data: {source: digits, limit: 100}\n  model: {type: small, width: 8}",
}

# The modules of the process that trains, or starts the ranks that train.
PROGRAM = """
import json, sys
from samestep.cli.main import main
code = main(sys.argv[1:])
print("found", json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("regression", "single"),
        pytest.param("digits", "single", marks=pytest.mark.slow),
        pytest.param("regression", "dp2", marks=pytest.mark.slow),
    ],
)
def test_training_imports_nothing_large_that_it_has_no_use_for(task: str, layout: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"recipe:\n  {JOBS[task]}\n  batch: 8\n  steps: 2\nrun: {{layout: {layout}, device: cpu, threads: 1}}\n",
        encoding="utf-8",
    )
    words = ["train", str(job), "--folder", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert lines, done.stderr
    code, modules = json.loads(lines[0].removeprefix("found "))
    assert code == 0, done.stderr
    assert "torch" in modules
    assert UNUSED.isdisjoint(modules)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_translating_asks_the_engine_without_importing_the_compiler() -> None:
    """Half as much again as PyTorch itself; what compiles is the engine's step, which here isn't taken."""
    program = (
        "import sys; from samestep.cli.main import main; code = main(sys.argv[1:]); "
        "print('engine', code, 'samestep.engines.native.trainer' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    source = Path(__file__).parent.parent / "examples" / "translate" / "ds_config.json"
    words = [sys.executable, "-c", program, "translate", str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "engine 0 True False", done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("module", ["launcher", "remote_agent"])
def test_a_launcher_and_a_remote_agent_begin_without_pytorch(module: str) -> None:
    # They take orders first, and import it where it is told not to warn of names that can't be found.
    code = f"import sys, samestep.launch.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
