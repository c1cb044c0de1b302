"""`make gpu` on a machine without an accelerator: what it runs there, what it leaves out, and what it writes."""

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")


def test_sections_run_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sections = runpy.run_path(str(ROOT / "benchmarks" / "gpu_sections.py"))["SECTIONS"]
    _assert_found({name: asdict(sections[name]("tiny")) for name in ("attention", "memory", "waits")})


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_without_an_accelerator_it_runs_what_it_can_and_says_what_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--only", "attention", "memory", "waits"]
    done = subprocess.run(
        [*command, "--seconds", "150", "--json", str(file)], capture_output=True, text=True, timeout=160, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert "no accelerator" in found["machine"]
    _assert_found(found["sections"])


def _assert_found(sections: Mapping[str, Any]) -> None:
    flash, plain = (
        {row[1]: float(row[2]) for row in sections["attention"]["rows"]}[name] for name in ("flash", "math")
    )
    assert 0 < flash < 0.02
    assert 0 < plain < 0.02  # bf16 has 8 bits
    held = {row[1]: float(row[2]) for row in sections["memory"]["rows"]}
    assert held["single recompute=full"] < held["single"]
    waits = sections["waits"]
    assert {**waits, "titles": list(waits["titles"])} == {
        "titles": ["model", "layout", "waits a step", "which"],
        "rows": [],
        "left_out": ["waits for the device: no accelerator"],
    }


@pytest.mark.slow
def test_a_section_that_takes_too_long_is_left_behind_and_named() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--only", "throughput", "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "left out: all of it: it took more than 1 s" in done.stdout


def test_a_slow_section_leaves_time_to_those_after_it() -> None:
    limit = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))["limit"]
    left = 470.0
    for later in range(8, -1, -1):
        taken = limit(left, later=later)
        assert taken >= 25
        left -= taken
    assert left >= 0
    assert limit(0.0, later=3) == 1.0
