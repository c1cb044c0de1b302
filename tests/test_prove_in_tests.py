"""The verdict where it is used: in a test, on a line of GitHub's, and as SARIF."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from script_records import Record, Step, runs, weights

from samestep.errors import UserError
from samestep.recording.store import EVENTS
from samestep.script_proof import command
from samestep.script_proof.annotations import github, place_of, sarif
from samestep.script_proof.compare import Verdict, compare_runs
from samestep_prove import assert_same_step

ROOT = Path(__file__).resolve().parent.parent


def judged(folder: Path, factor: float) -> Verdict:
    """Of records in which the gradients of the split run are so many times as large, and calls have lines."""

    def record(rows: str, factor: float = 1.0) -> Record:
        gradients = {name: factor * value for name, value in weights(1).items()}
        return Record(steps=[Step(rows=list(rows), gradients=gradients, after=weights(2))], before=weights(0))

    place = runs(folder, alone=record("ab"), split=[record("a", factor), record("b", factor)])
    lines = [json.dumps({"event": "place", "what": what, "file": "a b,c.py", "line": line}) for what, line in LINES]
    with (place / "split" / "rank-0" / EVENTS).open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return compare_runs(place)


LINES = (("forward", 3), ("gradient", 4), ("step", 5))


def test_a_difference_stands_on_the_line_of_its_call(tmp_path: Path) -> None:
    found = judged(tmp_path, 2.0)
    assert found.finding is not None
    place = place_of(found.finding, tmp_path)
    assert place == ("a b,c.py", 4)
    line = github(found, "train.py", place)
    assert line.startswith("::error file=a b%2Cc.py,line=4,title=not the same step: summed::step 1, gradient: ")
    (result,) = sarif(found, place)["runs"][0]["results"]
    assert result["ruleId"] == "summed"
    region: Any = result["locations"][0]["physicalLocation"]
    assert (region["artifactLocation"]["uri"], region["region"]["startLine"]) == ("a b,c.py", 4)


def test_the_same_step_is_a_notice_and_no_result(tmp_path: Path) -> None:
    found = judged(tmp_path, 1.0)
    assert github(found, "train.py", None) == (
        "::notice title=the same step::train.py: 2 processes take the steps of one, 1 compared"
    )
    assert sarif(found, None)["runs"][0]["results"] == []


def test_a_function_of_no_module_is_refused() -> None:
    def inside() -> None:
        pass

    with pytest.raises(UserError, match="is no function of a module's own"):
        assert_same_step(inside)


def test_the_action_calls_the_command_as_it_is(tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = action["runs"]["steps"]
    program = tmp_path / "samestep-prove"
    program.write_text(f'#!{sys.executable}\nimport sys\nprint("\\n".join(sys.argv[1:]))\n', encoding="utf-8")
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SCRIPT": "train.py --batch 4", "SARIF": "out.sarif"}
    variables["OPTIONS"] = "--on cpu --steps 5"
    words = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", steps[-1]["run"]],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    options = command._parser().parse_args(words)
    assert (options.script, options.on, options.steps) == ("train.py --batch 4", "cpu", 5)
    assert (options.format, options.sarif) == ("github", Path("out.sarif"))
    assert {name for step in steps for name in _inputs(step)} == action["inputs"].keys()


def _inputs(step: dict[str, Any]) -> list[str]:
    values = [*step.get("env", {}).values(), *step.get("with", {}).values()]
    return [value.partition("inputs.")[2].rstrip(" }") for value in values if "inputs." in value]


def test_pytest_has_the_proof_as_a_fixture_in_its_root_folder(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "test_it.py").write_text(USE_OF_THE_FIXTURE, encoding="utf-8")
    entry_points = tomllib.loads((ROOT / "packages/prove/pyproject.toml").read_text(encoding="utf-8"))["project"]
    plugin = entry_points["entry-points"]["pytest11"]["samestep"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:randomly", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=inner,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 passed" in done.stdout, done.stdout


USE_OF_THE_FIXTURE = """
import pathlib
import samestep_prove

def test_it(assert_same_step):
    assert assert_same_step is samestep_prove.assert_same_step
    assert pathlib.Path("pytest.ini").is_file()
"""


def train() -> None:
    """One rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rows = torch.randn(8, 8, generator=generator)[rank * 8 // count : (rank + 1) * 8 // count]
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= count
        optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_function_and_a_script_are_proved_in_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_same_step(train).steps == 3
    monkeypatch.chdir(ROOT / "zoo")
    with pytest.raises(AssertionError, match=r"^pieces\.py:\d+: not the same step: .*\[summed\]$|^fault_allreduce"):
        assert_same_step(shlex.join(["fault_allreduce_sum.py"]))
