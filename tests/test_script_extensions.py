"""Operators that are compiled: named while they are, and no lock of a killed run is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestep.script_proof import extensions
from samestep.script_proof.runs import ScriptProof, make_start


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of an operator, with nothing else in the cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "cpu_adam"
    place.mkdir(parents=True)
    (place / "cpu_adam.so").touch()
    return place / "lock"


COMPILES = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(60)"


def test_a_lock_goes_with_the_process_that_held_it(lock: Path, tmp_path: Path) -> None:
    proof = ScriptProof(script=("train.py",), engine="deepspeed")
    start = make_start(proof, tmp_path, "alone", proof.script, proof.settings, 1)
    with subprocess.Popen([sys.executable, "-c", COMPILES, str(lock)], stdout=subprocess.PIPE) as compiles:
        try:
            assert compiles.stdout is not None
            compiles.stdout.readline()
            said = start.status()
        finally:
            compiles.kill()
    assert said == "running train.py with 1 process, which compiles cpu_adam, once for this machine"
    extensions.remove_abandoned(start.settings_file.stat().st_mtime)
    assert not lock.exists()
    assert start.status() == "running train.py with 1 process, 0 steps recorded"


def test_a_lock_that_is_held_stays(lock: Path) -> None:
    with lock.open("w"):
        extensions.remove_abandoned(0.0)
    assert lock.exists()


@pytest.mark.parametrize(("age", "stays"), [(60, True), (7200, False)])
def test_a_lock_of_another_run_is_removed_when_it_is_old(lock: Path, age: float, stays: bool) -> None:
    lock.touch()
    os.utime(lock, (time.time() - age, time.time() - age))
    extensions.remove_abandoned(time.time())
    assert lock.exists() == stays
