"""`verify --script` on scripts that are odd, or no trainings: one clear message each, and nothing left running."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REFUSED = {
    "nothing": r"alone, ended without a step of a torch\.optim optimizer; use one that trains",
    "endless": r"odd_training\.py endless with 1 process did not end within 3 s; --steps N stops it",
    "not-alone": r"(?s)failed \(verify needs one that works with one process.*this script is for several ranks",
    "needs-data": r"(?s)failed.*the following arguments are required: --data",
    "own-processes": r"starts its ranks itself, and 1 of them trained in the split run, where --processes is 2",
    "waits": r"waits with 1 process started processes of its own and took no step of an optimizer within 3 s",
    "modules": r"--modules \*\.nowhere: no parameter has such a name; there are weight, bias",
    "exits": r"(?s)with 1 process failed.*exit code",
}
JUDGED = ("no-module", "alike", "forks", "leaves", "traceback", "goes-on", "long")
OTHERS = ("modules", "module", "places", "places:micro-batches", "rounds", "departs", "coarse")

# Each kind takes some starts of Python; tests/test_bad_inputs.py has fast tests of some.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def judged(kinds: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests/scripts/judge_odd.py"), *kinds]
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return judged(list(dict.fromkeys([*REFUSED, *JUDGED, *OTHERS])))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_proved_is_told(found: dict[str, Any], kind: str) -> None:
    outcome = found[kind]
    assert isinstance(outcome, str), outcome
    assert re.search(REFUSED[kind], outcome)


@pytest.mark.parametrize("kind", JUDGED)
def test_an_odd_script_is_judged(found: dict[str, Any], kind: str) -> None:
    outcome = found[kind]
    assert outcome["same_step"], outcome
    assert outcome["steps"] == (3 if kind == "leaves" else 4)


def test_a_place_in_the_batch_is_no_rounding(found: dict[str, Any]) -> None:
    places = found["places"]
    assert (places["kind"], places["first_difference"]["step"]) == ("forward-differs", 1), places
    assert places["noise"]["gradient"] < 1e-4
    assert any("its place in the batch matters" in note for note in places["notes"])


def test_a_module_is_judged_in_float64_and_in_micro_batches(found: dict[str, Any]) -> None:
    module, script = found["module"], found["long"]
    assert (module["same_step"], module["steps"]) == (True, 4), module
    assert module["noise"]["parameters"] < 1e-13 < script["noise"]["parameters"]
    assert not any(_WHOLE in note for note in module["notes"])


def test_a_model_that_can_not_be_called_with_halves_is_told(found: dict[str, Any]) -> None:
    places, halves = found["places"], found["places:micro-batches"]
    assert any(_WHOLE in note for note in halves["notes"])
    assert (halves["kind"], halves["noise"]) == (places["kind"], places["noise"])


def test_a_small_departure_is_rounding_only_where_float64_has_none(found: dict[str, Any]) -> None:
    rounds, departs = found["rounds"], found["departs"]
    assert rounds["same_step"], rounds
    assert rounds["noise"]["gradient"] < 1e-12
    assert any("apart from step" in note and "that is rounding" in note for note in rounds["notes"])
    assert departs["kind"] == "gradients-differ", departs
    assert any("in float64 the runs differ too" in note for note in departs["notes"])


def test_what_computes_in_bfloat16_is_judged_by_the_rounding_of_halves(found: dict[str, Any]) -> None:
    coarse = found["coarse"]
    assert coarse["same_step"], coarse
    assert any("called with each half of a batch" in note for note in coarse["notes"])
    assert any("an update that departs for another reason is not reported" in note for note in coarse["notes"])


_WHOLE = "can't be called with a half of its batch"


def test_what_was_not_seen_is_said(found: dict[str, Any]) -> None:
    assert any("no samples were seen" in note for note in found["no-module"]["notes"])
    equal = [
        "losses of all ranks are equal" in " ".join(found[kind]["notes"]) for kind in ("no-module", "alike", "long")
    ]
    assert equal == [False, True, False]


def test_an_end_that_was_not_seen_is_said(found: dict[str, Any]) -> None:
    assert any("left without an end that Python knows" in note for note in found["leaves"]["notes"])


def test_nothing_is_left_running(found: dict[str, Any]) -> None:
    assert found
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "odd_training.py" not in left
