"""DeepSpeed's offload to disk, where its extension can be built; and the message where it can't."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from proving import prove, same
from small_tasks import Points
from torch import nn

import samestep
from samestep import environment
from samestep.api import verify_layouts
from samestep.engines.deepspeed import nvme
from samestep.job import Job, Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

PROBE = (
    "import sys; from deepspeed.ops.op_builder import AsyncIOBuilder; sys.exit(not AsyncIOBuilder().is_compatible())"
)


@cache
def can_build() -> bool:
    if shutil.which("ninja") is None or shutil.which("g++") is None:
        return False
    with environment.deepspeed_settings("cpu", 0):
        return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode == 0


class Wide(Points):
    """One matrix whose shards DeepSpeed moves to disk, among others that are too small; no size is a round one."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 1027), nn.GELU(), nn.Linear(1027, 1055), nn.GELU(), nn.Linear(1055, self.classes)
        )


def recipe(**values: Any) -> samestep.Recipe:
    return samestep.Recipe(task=Wide(), batch=33, steps=3, clip=0.5, optimizer=samestep.AdamW(lr=1e-3), **values)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the extension is built, where it isn't yet
def test_what_is_on_disk_takes_the_step_of_one_process(tmp_path: Path) -> None:
    if not can_build():
        pytest.skip("async_io can't be built: apt-get install libaio-dev, pip install ninja")
    run = {"engine": "deepspeed", "offload_folder": tmp_path, "micro_batch": 9}
    layout, asked = "fsdp2 offload=optimizer-disk", recipe()
    cases: dict[str, Any] = {layout: (asked, layout, run)}
    assert same(prove(cases), list(cases)) == {}
    shard = -(-1027 * 1055 // 2)
    ranks = samestep.dry_run(asked, layout, device="cpu", **run)
    # A float32 copy of the matrix for the optimizer, and its two averages.
    assert [rank.disk for rank in ranks] == [3 * 4 * shard] * 2
    assert not any(tmp_path.iterdir())


def test_without_the_extension_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvme, "_BUILD", "raise SystemExit('libaio is not there')")
    nvme.build.cache_clear()
    with pytest.raises(samestep.UserError, match=r"can't be built here \(libaio is not there\); .* libaio-dev"):
        samestep.train(recipe(), "fsdp2 offload=optimizer-disk", engine="deepspeed", offload_folder=tmp_path)


def test_a_folder_that_is_not_there_is_named_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvme, "_BUILD", "raise SystemExit('libaio is not there')")
    nvme.build.cache_clear()
    folder = tmp_path / "nowhere"
    with pytest.raises(samestep.UserError, match=r"offload_folder is .*nowhere: there is no such folder"):
        samestep.train(recipe(), "fsdp2 offload=optimizer-disk", engine="deepspeed", offload_folder=folder)


def test_a_layout_that_can_not_be_is_a_row_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_BUILD", "raise SystemExit('it was built')")
    nvme.build.cache_clear()
    job = Job(recipe=recipe(), run=Run(engine="deepspeed", device="cpu"))
    (row,) = verify_layouts(job, ["zero1x2 offload=optimizer-disk"], steps=1)
    assert row.reason is not None
    assert "it was built" not in row.reason


def test_a_build_that_waits_for_ever_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvme, "_BUILD", "import time; time.sleep(60)")
    monkeypatch.setattr(nvme, "_LONGEST_BUILD", 0.5)
    nvme.build.cache_clear()
    with pytest.raises(samestep.UserError, match=r"not built after 0.5 seconds; .* named lock"):
        samestep.train(recipe(), "fsdp2 offload=optimizer-disk", engine="deepspeed", offload_folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_build_that_is_stopped_lets_go_of_its_lock(
    background: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, lock = tmp_path / "began", tmp_path / "lock"
    held = (
        f"import os, pathlib, time; pathlib.Path({str(began)!r}).touch(); pathlib.Path({str(lock)!r}).touch()\n"
        f"try: time.sleep(60)\nfinally: os.remove({str(lock)!r})"
    )
    monkeypatch.setattr(nvme, "_BUILD", held)
    monkeypatch.setattr(nvme, "_LONGEST_BUILD", 2.0)
    nvme.build.cache_clear()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    try:
        with pytest.raises(samestep.UserError, match=r"not built after 2.0 seconds"):
            samestep.train(recipe(), "fsdp2 offload=optimizer-disk", engine="deepspeed", offload_folder=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert began.exists()
    assert not lock.exists()


def test_parameters_that_would_come_back_as_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}')
    with pytest.raises(samestep.UserError, match=r"offload_param on nvme, .* takes parameters for bf16"):
        samestep.train(recipe(), "fsdp2", engine="deepspeed", engine_config=file)
