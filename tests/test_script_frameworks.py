"""`verify --script` on trainings under other frameworks, through the launcher: right ones, and one fault of each."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts/framework_training.py"
# The engine whose environment a framework's script needs, the package, and the kind of its planted fault.
FRAMEWORKS = {
    "fsdp1": ("torch", "torch", "clip-local-norm"),
    "lightning-fsdp": ("torch", "lightning", "summed"),
    "accelerate-fsdp2": ("accelerate", "accelerate", "learning-rate-scaled"),
    "accelerate-deepspeed": ("deepspeed", "deepspeed", "accumulation-divisor"),
    "deepspeed-1": ("deepspeed", "deepspeed", "learning-rate-scaled"),
    "deepspeed-2": ("deepspeed", "deepspeed", "learning-rate-scaled"),
    "deepspeed-3": ("deepspeed", "deepspeed", "learning-rate-scaled"),
    "horovod": ("horovod", "horovod", "summed"),
}


def verified(folder: Path, framework: str, *words: str) -> tuple[int, dict[str, Any]]:
    engine, package, _ = FRAMEWORKS[framework]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    file = folder / "verdict.json"
    command = [
        *(sys.executable, "-m", "samestep", "verify", "--script", " ".join([str(SCRIPT), framework, *words])),
        *("--engine", engine, "--json", str(file), "--time-limit", "100"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=dict(os.environ))
    assert file.is_file(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_right_training_is_the_same_step(tmp_path: Path, framework: str) -> None:
    code, verdict = verified(tmp_path, framework)
    assert (code, verdict["same_step"]) == (0, True), verdict
    assert verdict["steps"] == 3
    assert verdict["noise"]["gradient"] < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_planted_fault_is_found(tmp_path: Path, framework: str) -> None:
    code, verdict = verified(tmp_path, framework, "fault")
    assert (code, verdict["kind"]) == (1, FRAMEWORKS[framework][2]), verdict
    assert verdict["first_difference"]["step"] == 1
