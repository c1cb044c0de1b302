"""Dropout under layouts that cut the model itself: the masks of one process, in their parts."""

from dataclasses import replace

import pytest
from proving import Case, prove, prove_alone, same
from tiny_models import Tiny

import samestep
from samestep.api import verify_layouts
from samestep.job import Job, Run


def recipe_of(name: str) -> samestep.Recipe:
    optimizer = samestep.AdamW(lr=1e-2)
    return samestep.Recipe(task=Tiny(name=name), batch=10, steps=3, clip=0.5, optimizer=optimizer)


@pytest.mark.slow
def test_a_cut_model_drops_what_one_process_drops() -> None:
    recipe = recipe_of("bert")
    layouts = ["tp2 sequence=split", "pp2"]
    cases: dict[str, Case] = {layout: (recipe, layout, {}) for layout in layouts}
    cases["no dropout in attention"] = replace(recipe, attention_dropout=False), "pp2", {}
    proofs = prove(cases, steps=2, dropout=True)
    assert same(proofs, list(cases)) == {}
    assert proofs["no dropout in attention"] != proofs["pp2"]
    assert proofs["pp2"] != prove_alone(recipe, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_cut_models_drop_what_one_process_drops(name: str) -> None:
    recipe = recipe_of(name)
    layouts = ["tp2", "tp2 sequence=split", "cp2", "pp2", "fsdp2"]
    rows = verify_layouts(Job(recipe=recipe, run=Run(threads=1), name=name), layouts, steps=3, dropout=True)
    assert [row.layout for row in rows if row.reason is not None] == []
    assert all(row.passed for row in rows), rows
    alone = Job(recipe=replace(recipe, attention_dropout=False), run=Run(threads=1), name=name)
    other = verify_layouts(alone, ["pp2", "cp2"], steps=3, dropout=True)
    assert all(row.passed for row in other), other
    assert other[0].proof != rows[3].proof
    assert rows[-1].proof != prove_alone(recipe, steps=3)
