"""`verify --bits`: equal bits, other bits and where they are, refusals; an elastic change keeps every bit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import job_of, train_all
from safetensors.torch import load_file
from small_tasks import Points

import samestep
from samestep.api import verify_bits
from samestep.checkpoint.one_process import Tensors
from samestep.cli.main import main
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.run_folder import name_of
from samestep.verification.bits import compare_bits, take_bits

RECIPE = samestep.Recipe(
    task=Points(dropout=0.1),
    batch=33,
    steps=9,
    clip=0.5,
    optimizer=samestep.AdamW(lr=1e-2),
    evaluation=samestep.Evaluation(every=2),
)
EXAMPLE = str(Path(__file__).parent.parent / "examples" / "regression.yaml")
WHAT = ["losses", "gradient norms", "parameters", "optimizer state", "metrics"]


def test_layouts_have_the_bits_of_one_process() -> None:
    rows = verify_bits(Job(recipe=RECIPE), ["dp2", "fsdp2", "tp2"], steps=4)
    assert [row.verdict for row in rows] == ["same bits", "same bits", "refused"]
    for row in rows[:2]:
        assert {name: list(places) for name, places in row.differs.items()} == {name: [] for name in WHAT}
        assert row.cost is not None
        assert row.cost > 0
        assert row.ordered_seconds is not None


def test_every_kind_of_other_bit_is_told(tmp_path: Path) -> None:
    """The smallest change of a number: the next float32, planted into each thing that is compared."""
    with join(alone=True, device="cpu", threads=1) as world:
        job = Job(recipe=RECIPE, run=Run(reduction="ordered"))
        taken = {
            name: take_bits(job, Points(dropout=0.1), world, Layout(), 3, tmp_path / name, 1) for name in ("a", "b")
        }
        assert compare_bits("single", taken["a"], taken["b"]).same_bits
        other = samestep.Recipe(task=Points(), batch=33, steps=9, optimizer=samestep.AdamW(lr=1.0001e-2))
        moved = take_bits(Job(recipe=other, run=job.run), Points(), world, Layout(), 3, tmp_path / "c", 1)
    row = compare_bits("single", moved, taken["a"])
    assert not row.same_bits
    assert row.verdict == "OTHER BITS"
    assert row.differs["losses"] == ["step 0", "step 1", "step 2"]
    assert any(
        place.startswith("model.0.weight (") and "of 64 numbers)" in place for place in row.differs["parameters"]
    )
    assert any(place.startswith("optimizer.0.weight.exp_avg (") for place in row.differs["optimizer state"])
    assert json.loads(json.dumps(row.to_json()))["same_bits"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [("dp4", "dp3", "dp4"), ("fsdp4", "zero1x3", "dp2 fsdp2")],
    ids=" ".join,
)
def test_an_elastic_change_keeps_every_bit(layouts: Sequence[str], tmp_path: Path) -> None:
    """From 4 ranks to 3 and back to 4: eight virtual ranks do not divide by 3."""

    def part(number: int) -> Any:
        checkpoint: dict[str, Any] = {"every": 3, "keep": 9}
        if number:
            checkpoint["resume"] = str(tmp_path / str(number - 1) / "checkpoints" / name_of(3 * number))
        return job_of(RECIPE, layouts[number], tmp_path / str(number), reduction="ordered", checkpoint=checkpoint)

    (alone,) = train_all([job_of(RECIPE, "single", tmp_path / "alone", reduction="ordered", checkpoint={"every": 3})])
    for number in range(3):
        (result,) = train_all([part(number)])
        assert result.first_step == 3 * number
        assert result.losses == alone.losses[3 * number :]
        assert result.metrics == alone.metrics
        assert _bits(result.folder) == _bits(alone.folder)


def _bits(folder: Path) -> Mapping[str, bytes]:
    """Of the weights that a run leaves, and of its last checkpoint's parameters and optimizer state."""
    last = Tensors(folder / "checkpoints" / name_of(9))
    tensors = {name: last.read(name) for name in last.entries if not name.startswith("random.")}
    tensors |= load_file(folder / "model.safetensors")
    return {name: each.reshape(-1, 1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--script", "train.py", "--bits"], "--bits is for run.reduction: ordered of a job file"),
        ([EXAMPLE, "--bits", "--dropout"], "--dropout: --bits compares steps with the recipe's dropout as it is"),
        (
            [EXAMPLE, "--bits", "--report", "page.html"],
            "--report: --bits has no page; write its numbers with --json",
        ),
        (
            [EXAMPLE, "--bits", "--precision", "bf16"],
            "--precision: --bits compares steps in the recipe's own precision",
        ),
        ([EXAMPLE, "--precision", "fp8"], "a proof in fp8: use fp64, fp32, bf16"),
        ([EXAMPLE, EXAMPLE, "--bits"], "is a second job file, and --bits takes one"),
        ([EXAMPLE, "--bits", "--layout", "tp2"], 'layout "tp2": run.reduction is ordered, which is for data ranks'),
        ([EXAMPLE, "--bits", "--layouts", "tp2"], 'layout "tp2": run.reduction is ordered, which is for data ranks'),
        (
            [EXAMPLE, "--bits", "--engine", "data-parallel"],
            'engine "data-parallel" does not have; use engine native',
        ),
    ],
)
def test_what_can_not_be_proved_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.quick
def test_no_steps_are_refused() -> None:
    with pytest.raises(UserError, match="steps is 0; it must be a whole number from 1 to 1,000,000,000"):
        verify_bits(Job(recipe=RECIPE), ["dp2"], steps=0)


def test_the_command_tells_the_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bits.json"
    given = ["verify", EXAMPLE, "--bits", "--layout", "dp2", "--steps", "3", "--json", str(file)]
    assert main(given) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))
    assert row["same_bits"] is True
    assert row["steps"] == 3
    assert row["cost"] == pytest.approx(row["ordered_seconds"] / row["fast_seconds"])
    told = capsys.readouterr().out
    assert "same bits" in told
    assert "compared after 3 steps: losses, gradient norms, parameters, optimizer state, metrics" in told
