"""`samestep check` on the jobs that ship and on models of one's own: the contract is kept, and no layout fails."""

import json
from collections.abc import Set
from pathlib import Path

import drawing_nets as drawing
import odd_models
import odd_nets as nets
import odd_tasks as odd
import pytest
from shown_pages import is_shown

import samestep
from samestep.cli.main import main

EXAMPLES = Path(__file__).parent.parent / "examples"

# The layouts that are tried of a model without experts.
REPLICAS_AND_SHARDS = {"dp2", "zero1x2", "zero2x2", "fsdp2", "fsdp2 recompute=full"}
TOKENS = {"tp2 sequence=split", "cp2"}
TRIED = {*REPLICAS_AND_SHARDS, *TOKENS, "tp2", "pp2"}

# The jobs that ship, and what each can't have: convolutions and spirals have no tokens, and one dense layer has
# neither a pair of layers to slice nor a second one for another stage.
SHIPPED = {
    "digits": TOKENS,
    "own_task": TOKENS,
    "regression": TRIED - REPLICAS_AND_SHARDS,
    "proof/text": set[str](),
    "proof/language": set[str](),
    "proof/images": TOKENS,
    "proof/regression": TRIED - REPLICAS_AND_SHARDS,
}

# Unlike models, and what each can't have over two ranks.
REFUSED: dict[str, tuple[samestep.Task, set[str]]] = {
    "stochastic depth": (odd.Odd(drawing.DropPath), {"tp2 sequence=split", "cp2"}),
    "batch norm": (odd.Odd(nets.NormedByBatch), {"tp2 sequence=split", "cp2"}),
    "experts": (odd_models.Odd(name="experts"), {"ep2"}),  # there are three
    "Swin": (odd_models.Odd(name="swin"), set()),
    "BART": (odd_models.Odd(name="bart"), set()),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", SHIPPED)
def test_a_job_that_ships_is_checked(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["check", str(EXAMPLES / f"{job}.yaml"), "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["kept"] is True
    assert {row["layout"]: row["verdict"] for row in found["layouts"]} == verdicts(TRIED, SHIPPED[job])
    assert job != "own_task" or is_shown("docs/contract.md", capsys.readouterr().out)


def verdicts(tried: Set[str], refused: Set[str]) -> dict[str, str]:
    return {layout: "refused" if layout in refused else "same" for layout in tried}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_ones_own_is_checked(name: str) -> None:
    task, refused = REFUSED[name]
    found = samestep.check(samestep.Recipe(task=task, batch=13, steps=4), threads=1)
    assert found.passed, found
    tried = TRIED | {"ep2"} if name == "experts" else TRIED
    assert {row.layout: row.verdict for row in found.layouts} == verdicts(tried, refused)
    reasons = {row.layout: row.reason for row in found.layouts if row.reason is not None}
    assert reasons.keys() == refused
    for layout, reason in reasons.items():
        assert "use " in reason
        assert reason.startswith(("model", f'layout "{layout}')), reason
        assert "\n" not in reason


@pytest.mark.slow
def test_the_layout_of_a_job_is_ignored_with_what_belongs_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    run = "{layout: pp2, cut_at: [anywhere], threads: 1}"
    file.write_text(f"recipe: {{task: regression, batch: 8, steps: 4}}\nrun: {run}\n", encoding="utf-8")
    assert main(["check", str(file), "--layouts", "dp2"]) == 0, capsys.readouterr().err


def test_a_layout_that_can_not_be_read_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("recipe: {task: regression, batch: 8, steps: 4}\nrun: {layout: garbage}\n", encoding="utf-8")
    assert main(["check", str(file), "--layouts", "dp2"]) == 2
    assert '"garbage" is not a part of a layout' in capsys.readouterr().err
