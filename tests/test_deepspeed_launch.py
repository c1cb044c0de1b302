"""Ranks that DeepSpeed's own launcher starts, and a process that none has started."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import free_port
from small_tasks import Points

import samestep
from samestep import environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

JOB = """
recipe:
  task: regression
  args: {{samples: 64, held_out: 16, features: 5}}
  batch: 13
  steps: 3
run: {{layout: zero1x2, engine: deepspeed, device: cpu, folder: {folder}, log: []}}
"""


@pytest.mark.slow  # DeepSpeed is imported by both of its launchers, and by each rank
def test_ranks_of_the_deepspeed_command_train(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(folder=tmp_path / "run"), encoding="utf-8")
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", f"--master_port={free_port()}"]
    command += ["--no_local_rank", "--module", "samestep", "train", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert (report["layout"], report["steps"]) == ("zero1x2", 3)


def test_a_host_has_as_many_ranks_as_the_deepspeed_command_says() -> None:
    started = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    ranks = environment.ranks(started)
    assert ranks is not None
    assert (ranks.rank, ranks.local_rank, ranks.local_world_size) == (5, 1, 4)


@pytest.mark.slow
def test_stage_3_of_a_configuration_takes_steps_without_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing says a local rank then, and DeepSpeed reads it in the middle of a step.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    recipe = samestep.Recipe(task=Points(), batch=33, steps=3, optimizer=samestep.AdamW(lr=1e-2))
    linear = torch.nn.functional.linear
    run: dict[str, Any] = {"device": "cpu", "threads": 1}
    alone = samestep.train(recipe, "single", folder=tmp_path / "alone", **run)
    by_deepspeed = {**run, "engine": "deepspeed", "engine_config": config}
    found = samestep.train(recipe, "single", folder=tmp_path / "found", **by_deepspeed)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    again = samestep.train(recipe, "single", folder=tmp_path / "again", **by_deepspeed)
    assert again.losses == found.losses
    assert torch.nn.functional.linear is linear  # DeepSpeed's own is for its steps alone
