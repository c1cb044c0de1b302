"""Schedules: each kind of decay beside transformers' own, functions of one's own; evaluation by epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import Points

import samestep
from samestep.errors import UserError
from samestep.training.schedule import rate

pytestmark = pytest.mark.quick
STEPS, WARMUP = 40, 6


def of_transformers(name: str, settings: dict[str, Any]) -> list[float]:
    """The fractions after a warm-up, whose step s has s / W there and (s + 1) / W here."""
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = optimization.get_scheduler(
        name, optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS, scheduler_specific_kwargs=settings
    )
    (factor,) = schedule.lr_lambdas
    return [factor(step) for step in range(WARMUP, STEPS)]


@pytest.mark.slow  # for the import of transformers; the formulas' values are below
@pytest.mark.parametrize(
    ("schedule", "name", "settings"),
    [
        ({"decay": "cosine_with_restarts", "cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"decay": "cosine", "final": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"decay": "polynomial", "power": 2.0}, "polynomial", {"lr_end": 0.0, "power": 2.0}),
        ({"decay": "inverse_sqrt"}, "inverse_sqrt", {}),
        (
            {"decay": "linear", "hold": 20},
            "warmup_stable_decay",
            {"num_decay_steps": STEPS - WARMUP - 20, "decay_type": "linear"},
        ),
    ],
)
def test_a_decay_is_that_of_transformers(schedule: dict[str, Any], name: str, settings: dict[str, Any]) -> None:
    spec = samestep.Schedule(warmup=WARMUP, **schedule)
    ours = [rate(spec, STEPS, step) for step in range(WARMUP, STEPS)]
    assert ours == pytest.approx(of_transformers(name, settings), abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "fractions"),
    [
        ({"decay": "cosine_with_restarts", "cycles": 2}, [1, 1 / 2, 1, 1 / 2]),
        ({"decay": "polynomial", "power": 2.0}, [1, 9 / 16, 4 / 16, 1 / 16]),
        ({"decay": "inverse_sqrt", "warmup": 1}, [1, 1, 1 / 2**0.5, 1 / 3**0.5]),
        ({"decay": "linear", "hold": 2}, [1, 1, 1, 1 / 2]),
        ({"decay": "cosine", "hold": 0.5, "warmup": 1}, [1, 1, 1, 1]),
        ({"decay": "linear", "hold": 0.5, "final": 0.2}, [1, 1, 1, 0.6]),
    ],
)
def test_the_fraction_at_each_of_four_steps(schedule: dict[str, Any], fractions: list[float]) -> None:
    spec = samestep.Schedule(**schedule)
    assert [rate(spec, 4, step) for step in range(4)] == pytest.approx(fractions, abs=1e-12)


def recipe(**changed: Any) -> samestep.Recipe:
    settings = {"task": Points(samples=20, held_out=4), "batch": 5, "steps": 8, "optimizer": samestep.SGD(lr=0.5)}
    return samestep.Recipe(**(settings | changed))


def train(folder: Path, **changed: Any) -> None:
    samestep.train(recipe(**changed), folder=folder, device="cpu", check=False)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_function_gives_the_rates(tmp_path: Path) -> None:
    file = tmp_path / "rates.py"
    file.write_text("def triangle(step, steps):\n    return 1 - abs(2 * step / (steps - 1) - 1)\n", encoding="utf-8")
    train(tmp_path / "run", schedule=samestep.Schedule(function=f"{file}:triangle"))
    rates = [step["lr"] for step in lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0.5 * (1 - abs(2 * step / 7 - 1)) for step in range(8)], rel=1e-12)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return -1.0", "gave -1 for step 0 of 8; it must give the fraction of the full rate"),
        ("return float('nan')", "gave nan for step 0 of 8"),
        ("return 1 / (3 - step)", "failed for step 3 of 8: ZeroDivisionError"),
        ("return random.random()", "ranks would train with different rates"),
    ],
)
def test_a_function_that_gives_no_rate_is_refused_before_the_first_step(
    tmp_path: Path, body: str, message: str
) -> None:
    file = tmp_path / "rates.py"
    file.write_text(f"import random\n\n\ndef own(step, steps):\n    {body}\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", schedule=samestep.Schedule(function=f"{file}:own"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rates.py:own", "no file rates.py"),
        ("own", "use a function of the step"),
        ("math:sinn", "sinn is not in math"),
    ],
)
def test_a_function_that_is_not_there_is_told(tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", schedule=samestep.Schedule(function=function))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hold": 3}, "hold is 3 and decay is none"),
        ({"power": 2.0, "decay": "cosine"}, "power is 2 and decay is cosine, which has none; use decay: polynomial"),
        ({"cycles": 2, "decay": "linear"}, "cycles is 2 and decay is linear"),
        ({"function": "math:cos", "warmup": 2}, "warmup and function are both given"),
        ({"hold": 1.5, "decay": "linear"}, "hold is 1.5"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        samestep.Schedule(**settings)


def test_a_decay_that_would_never_begin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so the decay would never begin"):
        train(tmp_path / "run", schedule=samestep.Schedule(warmup=2, hold=6, decay="linear"))
    train(tmp_path / "run", schedule=samestep.Schedule(warmup=2, hold=5, decay="linear"))


def test_each_epoch_is_evaluated(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=None, epochs=3, evaluation=samestep.Evaluation(every="epoch"))
    assert [line["step"] for line in lines_of(tmp_path / "run" / "evaluations.jsonl")] == [4, 8, 12]


def test_an_epoch_longer_than_the_training_is_told(tmp_path: Path) -> None:
    evaluation = samestep.Evaluation(every="epoch", at_end=False)
    with pytest.raises(UserError, match=r"is epoch \(4 steps\), recipe.steps is 3, and at_end is false"):
        train(tmp_path / "run", steps=3, evaluation=evaluation)
