"""A proof that can't fail is refused: one process that would be compared with itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_jobs import job_file
from small_tasks import Points

import samestep
from samestep import api
from samestep.cli.main import main
from samestep.job import Job, Run

pytestmark = pytest.mark.quick

REFUSED = "is one process here, which would be compared with itself; name the layout to prove, such as --layout dp2"
RECIPE = samestep.Recipe(task=Points(samples=20), batch=10, steps=2)


@pytest.fixture
def job(tmp_path: Path) -> str:
    return str(job_file(tmp_path, run={"check": False}))


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ([], "single"),
        (["--layout", "single"], "single"),
        (["--layout", "dp1"], "dp1"),
        (["--layout", "pp1 tp1"], "pp1 tp1"),
        (["--layout", "fsdp1"], "fsdp1"),
        (["--layout", "zero1x1"], "zero1x1"),
        (["--layout", "ddp", "--processes", "1"], "ddp"),
        (["--layout", "hsdp", "--processes", "1"], None),
        (["--layouts", "single"], "single"),
        (["--layouts", "single, dp1"], "dp1"),
        (["--bits"], "single"),
        (["--bits", "--layouts", "single, dp1"], "dp1"),
        (["--micro-batch", "10"], "single"),  # the whole batch
        (["--micro-batch", "64"], "single"),
        (["--dropout"], "single"),
        (["--precision", "fp64"], "single"),
        (["--reference-device", "cpu"], "single"),  # where the other side is as well
        (["--layout", "single schedule=gpipe"], None),  # refused before
        (["--set", "run.group_by_length=true"], "single"),
    ],
)
def test_one_process_is_not_held_against_itself(
    words: Sequence[str], layout: str | None, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", job, "--device", "cpu", *words]) == 2
    printed = capsys.readouterr()
    assert "the same step" not in printed.out
    if layout is not None:
        assert f'layout "{layout}" {REFUSED}' in printed.err


def test_nor_in_python() -> None:
    for layout in ("single", "dp1"):
        with pytest.raises(samestep.UserError, match="would be compared with itself"):
            samestep.verify(RECIPE, layout, threads=1, check=False)
    with pytest.raises(samestep.UserError, match="would be compared with itself"):
        samestep.verify(RECIPE)
    job = Job(recipe=RECIPE, run=Run(threads=1, check=False))
    (row,) = api.verify_layouts(job, ["single"])
    assert row.verdict == "refused"
    assert REFUSED in str(row.reason)
    (bits,) = api.verify_bits(job, ["single"])
    assert REFUSED in str(bits.reason)


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        ("single", {"micro_batch": 5}),
        ("recompute=full", {}),
        ("offload=activations", {}),
        ("single", {"engine": "data-parallel"}),
    ],
    ids=lambda value: str(value),
)
def test_what_one_process_computes_otherwise_is_compared(layout: str, run: dict[str, Any]) -> None:
    assert samestep.verify(RECIPE, layout, steps=1, threads=1, check=False, device="cpu", **run).same_step


def test_another_precision_is_compared() -> None:
    proof = samestep.verify(RECIPE, steps=1, threads=1, check=False, device="cpu", precision="fp32")
    assert proof.dtype == "float32"


def test_advice_that_is_followed_helps(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the list the rows that are proofs count."""
    assert main(["verify", job, "--device", "cpu", "--layouts", "single, recompute=full", "--steps", "1"]) == 0
    assert "refused: 1, same: 1" in capsys.readouterr().out
