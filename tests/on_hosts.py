"""Jobs on hosts of a testbed: how they are started and followed, and a record of what was seen."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import testbed
from small_jobs import TESTS, steps_in
from testbed import Host, Running
from testbed.possible import program
from tested import chinese

import samestep

PATH = os.pathsep.join([str(Path(samestep.__file__).parents[1]), str(TESTS)])

# What every command on a host is given: the samestep that is tested; and one thread, since all hosts share the cores.
VARIABLES = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "NO_COLOR": "1"}

SAME = "the losses of one process"  # of all steps


def needs_hosts(*, ssh: bool = True) -> pytest.MarkDecorator:
    """Skip what needs hosts where none can be made, with the reason."""
    reason = testbed.why_not(ssh=ssh)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def needs_programs(*names: str) -> pytest.MarkDecorator:
    """Skip what needs programs that are not installed."""
    missing = [name for name in names if program(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} is not installed; run tools/cluster-packages"
    )


def python(module: str, *arguments: str) -> list[str]:
    """A command of the Python that runs these tests."""
    return [sys.executable, "-m", module, *arguments]


def torchrun(rank: int, nodes: int, command: Sequence[str], *, ranks: int = 1, main: str = "host-a") -> list[str]:
    """torchrun with a node rank, as it stands in a script that runs on every host."""
    where = [f"--nnodes={nodes}", f"--node-rank={rank}", f"--nproc-per-node={ranks}"]
    meeting = [f"--master-addr={main}", "--master-port=29500"]
    return [*python("torch.distributed.run", *where, *meeting), "-m", *command]


def follow(commands: Sequence[Running], folder: Path, *, limit: float) -> float:
    """Wait for the good end of commands that train into a folder; seconds until it told of the first step.

    Raises AssertionError with what all have printed where one fails, or they take longer than `limit` seconds.
    """
    began = time.monotonic()
    first: float | None = None
    while any(command.poll() is None for command in commands):
        now = time.monotonic() - began
        if first is None and steps_in(folder):
            first = now
        if now > limit or any(command.poll() for command in commands):
            _end(commands, f"more than {limit:.0f} s" if now > limit else "a command failed")
        time.sleep(0.02)
    if any(command.poll() for command in commands):
        _end(commands, "a command failed")
    assert steps_in(folder), "\n".join(command.text for command in commands)
    return first if first is not None else time.monotonic() - began


def proved(file: Path) -> str:
    """What `samestep verify --json` has found, for the record. Fails where the step is not that of one process."""
    proof = json.loads(file.read_text(encoding="utf-8"))
    assert proof["same_step"]
    assert proof["dtype"] == "float64"
    worst = max(proof["max_relative_difference"].values())
    assert worst < 1e-10
    return f"same step, largest relative difference {worst:.0e}"


def _end(commands: Sequence[Running], reason: str) -> None:
    deadline = time.monotonic() + 5  # a command that has failed ends the others, which say why, too
    while any(command.poll() is None for command in commands) and time.monotonic() < deadline:
        time.sleep(0.02)
    for command in commands:
        command.stop()
    told = "\n".join(f"--- {command}\n{command.text}" for command in commands)
    pytest.fail(f"{reason}\n{told}")


def start_on(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], *, cwd: Path | None = None, **env: str
) -> list[Running]:
    """Start a command on each host, in the same moment; `cwd`: the folder, where it writes into the current one."""
    started = zip(hosts, commands, strict=True)
    return [host.start(command, env={**VARIABLES, **env}, cwd=cwd) for host, command in started]


def record(
    place: str,
    command: str,
    tried: str,
    seen: str,
    first_step: float | None = None,
    *,
    recovery: float | None = None,
    limits: str = "",
) -> None:
    """Note what a test has seen, where SAMESTEP_TESTED names a file: the table of docs/tested.md is made from it.

    `first_step` is seconds from the start to the first step, `recovery` seconds from a fault to the next step, and
    `limits` the time limits that govern it. Raises KeyError for words that tools/tested.py has no Chinese for.
    """
    for words in (place, tried, seen, limits):
        chinese(words)
    name = os.environ.get("SAMESTEP_TESTED")
    if name is None:
        return
    file = Path(name)
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows[f"{place}: {command}: {tried}"] = {
        "place": place,
        "command": command,
        "tried": tried,
        "seen": seen,
        "first_step_seconds": first_step,
        "recovery_seconds": recovery,
        "limits": limits,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
