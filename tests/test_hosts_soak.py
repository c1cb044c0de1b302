"""A soak over three hosts: ranks and hosts that are killed, cables that are pulled, and the same bits at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from on_hosts import needs_hosts

pytestmark = [needs_hosts(), pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "soak_hosts.py"


def test_hosts_that_die_and_cables_that_are_pulled_leave_the_bits_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    words = ["--faults", "5", "--between", "8", "--seed", "2", "--steps", "1000", "--json", str(file)]
    command = [sys.executable, str(SCRIPT), *words, "--kinds", "kill", "host", "cable"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert sum(found["faults"].values()) == 5
    assert {"host", "cable"} <= found["faults"].keys()
    known = {name: found[name] for name in ("same_weights", "same_losses", "samples_lost", "samples_repeated")}
    assert known == {"same_weights": True, "same_losses": True, "samples_lost": 0, "samples_repeated": 0}
    assert (found["left_processes"], found["left_files"]) == (0, 0)


def test_a_mistake_is_told_before_a_host_is_made() -> None:
    command = [sys.executable, str(SCRIPT), "--faults", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "soak_hosts: --soak is 0; use a number of faults of 1 or more\n")
