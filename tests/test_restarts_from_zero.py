"""A job whose restarts would take all steps again says so at its start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from small_tasks import Points

import samestep
from samestep import UserError, api
from samestep.engines.base import Abilities
from samestep.engines.native.engine import Native
from samestep.extras import is_installed

pytestmark = pytest.mark.quick

STEPS = 8
BEGINS = "a restart after a failure begins at step 0"


class Unsaved(Native):
    name: ClassVar[str] = "unsaved"
    abilities: ClassVar[Abilities] = Abilities(axes=Native.abilities.axes, precisions=Native.abilities.precisions)


def told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, recipe: Mapping[str, Any] | None = None, **run: Any
) -> str:
    """What a job says before its ranks are started."""
    values = {"batch": 10, "steps": STEPS, **(recipe or {})}
    with pytest.raises(UserError, match=r"^before any rank$"):
        samestep.train(
            samestep.Recipe(task=Points(), **values), folder=tmp_path / "run", device="cpu", check=False, **run
        )
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise UserError("before any rank")

    monkeypatch.setattr(api, "_trained", start)
    monkeypatch.setattr(api.fork_server, "start_early", lambda modules, ranks: None)


@pytest.mark.parametrize(
    ("run", "recipe", "line"),
    [
        ({"max_restarts": 2}, {}, f"nothing is saved, so {BEGINS}; set run.checkpoint.every"),
        ({"elastic": True, "layout": "dp2"}, {}, f"nothing is saved, so {BEGINS}"),
        ({"max_restarts": 2, "engine": Unsaved()}, {}, f'engine "unsaved" saves no checkpoints, so {BEGINS}'),
        ({"max_restarts": 2, "checkpoint": {}}, {}, f"nothing is saved before the last of {STEPS} steps"),
        ({"max_restarts": 2, "checkpoint": {"every": STEPS}}, {}, "(run.checkpoint.every: 8), so"),
        (
            {"max_restarts": 2, "checkpoint": {"every": 1000}},
            {"steps": None, "epochs": 2},
            "before the last of 40 steps",
        ),
    ],
)
def test_a_restart_from_step_0_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any], recipe: dict[str, Any], line: str
) -> None:
    said = told(tmp_path, capsys, recipe=recipe, **run)
    assert line in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("run", "recipe"),
    [
        ({}, {}),
        ({"checkpoint": {}}, {}),  # no restarts
        ({"engine": Unsaved()}, {}),
        ({"max_restarts": 2, "checkpoint": {"every": STEPS - 1}}, {}),
        ({"max_restarts": 2, "checkpoint": {"every": "10m"}}, {}),
        ({"max_restarts": 2, "checkpoint": {"memory": 1}}, {}),
        ({"max_restarts": 2, "checkpoint": {"best": "accuracy"}}, {}),
    ],
)
def test_others_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any], recipe: dict[str, Any]
) -> None:
    assert told(tmp_path, capsys, recipe=recipe, **run) == ""


def test_restarts_of_a_launcher_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun --max-restarts, and that of samestep launch."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert BEGINS in told(tmp_path, capsys)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert told(tmp_path, capsys) == ""


@pytest.mark.parametrize("engine", ["deepspeed", "keras-mirrored", "keras-parameter-server"])
def test_shipped_engines_without_checkpoints(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from samestep.engines.registry import resolve

    monkeypatch.setattr("samestep.door.entry.preflight", lambda job, layout, task, here: Points())
    abilities = resolve(engine).abilities
    assert not abilities.checkpoints
    if missing := [package for package in abilities.packages if not is_installed(package)]:
        pytest.skip(f"{' and '.join(missing)} isn't installed")
    said = told(tmp_path, capsys, engine=engine, max_restarts=1)
    assert f'engine "{engine}" saves no checkpoints, so {BEGINS}; engine native goes on from the last one' in said
