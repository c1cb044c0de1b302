"""`samestep verify --script` on scripts that it can't judge, or that do odd things: one message, nothing left."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

TRAINS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
for step in range(3):
    rows = data[8 * step + rank : 8 * step + 8 : world]
    optimizer.zero_grad()
    ((rows @ weight - 1) ** 2).mean().backward()
    dist.all_reduce(weight.grad)
    weight.grad /= world
    optimizer.step()
    MORE
"""

SCRIPTS = {
    "nothing": "print('no data in /data/train, so there is nothing to do')",
    "endless": "import time\nwhile True:\n    time.sleep(0.1)",
    "many": "import os\nif os.environ['WORLD_SIZE'] == '1':\n    raise SystemExit('this script needs 2 GPUs')",
    "arguments": "import argparse\np = argparse.ArgumentParser()\n"
    "p.add_argument('--data', required=True)\np.parse_args()",
    "tensors": TRAINS.replace("MORE", "pass"),
    "spawns": "import multiprocessing\n"
    "each = multiprocessing.get_context('fork').Process(target=print, args=('trained',))\neach.start()\neach.join()",
    "leaves": TRAINS.replace("MORE", "if rank == 1 and step == 1: import os; os._exit(0)"),
    "raises": TRAINS.replace("MORE", "if rank == 1: raise ValueError('rank 1 has no more rows')"),
    "tracebacks": TRAINS.replace(
        "MORE", "import traceback\n    try: 1 / 0\n    except ZeroDivisionError: traceback.print_exc()"
    ),
    "broken": "def train(:",
}

# The command, which a slow test starts, is held against all of them.
FAST = ("endless", "raises")

TOLD = {
    "nothing": ["ended without a step of a torch.optim optimizer", "its last words", "no data in /data/train"],
    "endless": ["with 1 process did not end within 4 s; --steps N stops it", "--time-limit SECONDS leaves it more"],
    "many": ["with 1 process failed", "--alone names arguments for that", "this script needs 2 GPUs"],
    "arguments": ["with 1 process failed", "the following arguments are required: --data"],
    "spawns": [
        "took no step of an optimizer in its own process, and started others",
        "without torch.multiprocessing",
    ],
    "leaves": ["with 2 processes failed"],
    "raises": ["with 2 processes failed", "ValueError: rank 1 has no more rows"],
    "broken": ["with 1 process failed", "SyntaxError"],
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return judged(FAST, tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def slow_outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return judged([name for name in SCRIPTS if name not in FAST], tmp_path_factory.mktemp("more_scripts"))


def judged(names: Iterable[str], folder: Path) -> dict[str, Any]:
    for name in names:
        (folder / f"{name}.py").write_text(SCRIPTS[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/scripts/bad_inputs.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of one script."""
    return request.getfixturevalue("outcome" if name in FAST else "slow_outcome")["found"][name]


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(TOLD))
def test_what_can_not_be_judged_has_one_message(name: str, found: dict[str, Any]) -> None:
    for words in TOLD[name]:
        assert words in found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(["tensors", "tracebacks"]))
def test_a_model_of_plain_tensors_and_tracebacks_that_are_printed_are_judged(
    name: str, found: dict[str, Any]
) -> None:
    assert found["same_step"]
    assert any("no samples were seen" in note for note in found["notes"])


@pytest.mark.parametrize("which", ["outcome", pytest.param("slow_outcome", marks=pytest.mark.slow)])
def test_no_process_is_left(which: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(which)["left"] == 0


# As a user starts it: by the command, whose ranks `samestep launch` starts. No script here changes the exit code.
JUDGED = ("tensors", "tracebacks")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_says_it_once_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPTS[name], encoding="utf-8")
    limit = 15 if name == "endless" else 60
    command = [sys.executable, "-m", "samestep", "verify", "--script", str(script), "--time-limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False, cwd=tmp_path)
    assert done.returncode == (0 if name in JUDGED else 2), done.stdout + done.stderr
    for words in TOLD.get(name, ()):
        assert words.replace("4 s", f"{limit} s") in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    assert len(said) == (name not in JUDGED), done.stderr
    assert [each for each in psutil.process_iter(["cmdline"]) if str(script) in (each.info["cmdline"] or [])] == []
    assert [file for file in tmp_path.iterdir() if file != script] == []
