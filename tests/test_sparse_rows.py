"""`run.sparse_rows`: the same numbers, fewer bytes, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import prove, same
from small_tasks import Points
from sparse_row_ranks import (
    ITEMS,
    TAGS,
    USERS,
    Branches,
    Factors,
    Ids,
    Recommender,
    Tied,
    exchanged,
    trained_both_ways,
)
from tiny_models import Tiny
from torch import nn

import samestep
from samestep import jobfile
from samestep.errors import UserError
from samestep.launch import local
from samestep.parallel.sparse_rows import find_tables, touched_rows
from samestep.validation import checked
from samestep.verification.proof import Proof


def recipe(kind: type[Any], **more: Any) -> samestep.Recipe:
    values = {"task": Ids(kind), "batch": 33, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return checked(samestep.Recipe, {**values, **more}, prefix=("recipe",))


RECIPES: Mapping[str, samestep.Recipe] = {
    "recommender": recipe(Recommender),
    "embeddings alone": recipe(Factors, optimizer=samestep.SGD(lr=0.1, momentum=0.9)),
    "branches": recipe(Branches),
}


# Batches of 33 of 200 samples leave a last one of 2.
ROWS: Mapping[str, Any] = {"sparse_rows": "on"}
CASES = {
    f"{name} {run}": (each, {**ROWS, **run}) for name, each in RECIPES.items() for run in ({}, {"micro_batch": 4})
}

FEW = ["recommender {}", "branches {'micro_batch': 4}"]


@pytest.fixture(scope="module")
def of_two() -> Mapping[str, Proof | str]:
    """Proofs and refusals of two ranks, all in one start of them."""
    no_embedding = checked(samestep.Recipe, {"task": Points(), "batch": 8, "epochs": 1})
    others = {
        "tied": (recipe(Tied), ROWS),
        "none": (no_embedding, ROWS),
        "tied, left to itself": (recipe(Tied), {}),
    }
    few = {name: CASES[name] for name in FEW}
    return prove({name: (each, "dp2", run) for name, (each, run) in {**few, **others}.items()})


def test_two_replicas_that_send_rows_take_the_steps_of_one_process(of_two: Mapping[str, Any]) -> None:
    assert same(of_two, [*FEW, "tied, left to itself"]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp3"])
def test_more_replicas_that_send_rows_take_the_steps_of_one_process(layout: str) -> None:
    cases = {name: (each, layout, run) for name, (each, run) in CASES.items()}
    assert same(prove(cases), list(cases)) == {}


@pytest.mark.slow
def test_hybrids_send_rows_between_their_replicas() -> None:
    texts = samestep.Recipe(task=Tiny(name="bert"), batch=10, steps=9, optimizer=samestep.AdamW(lr=1e-2))
    cases = {layout: (texts, layout, {"sparse_rows": "on"}) for layout in ("dp2 tp2", "dp2 cp2")}
    assert same(prove(cases), list(cases)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "transport"),
    [
        pytest.param("aa", "gloo", marks=pytest.mark.slow),
        pytest.param("aaa", "auto", marks=pytest.mark.slow),
        ("aab", "auto"),
    ],
)
def test_rows_give_the_bits_of_the_whole_gradient(hosts: str, transport: str) -> None:
    n = len(hosts)
    found = local.start(trained_both_ways, (RECIPES, f"dp{n}", transport, hosts, 4), n)
    assert [name for name, (apart, _) in found.items() if apart] == []
    rows, whole = found["recommender"][1]
    tables = 4 * (USERS * 6 + ITEMS * 5 + TAGS * 3) * 2 * (n - 1) / n
    assert whole > tables
    assert rows < whole - 0.8 * tables


def test_each_way_sends_what_it_is_chosen_for() -> None:
    n, row, number = 3, 8 * 4, 4
    cases = [
        [range(100), range(0), range(5)],  # most of one rank: all rows
        [range(0, 10), range(10, 20), range(90, 100)],  # other rows each: 2 x 10 against 4/3 x 30
        [range(0, 10), range(0, 10), range(2, 11)],  # nearly the same: 4/3 x 11 against 2 x 10
        [[-1], [3, 4], [-1]],  # two ranks have no gradient: 2 x 2 against 4/3 x 2
        [[-1], [-1], [-1]],
    ]
    found = local.start(exchanged, ([[list(rows) for rows in case] for case in cases], "auto"), n)
    assert [wrong for wrong, _ in found] == [""] * len(cases)
    gather, reduce = n - 1, 2 * (n - 1) / n
    # The first message has the counts and as many numbers as the last step had, and an eighth more; what has no room
    # goes again, behind another count.
    first = [gather * number * (1 + room) for room in (0, 0, 11, 11, 2)]
    again = [0, gather * number * (1 + 10), 0, 0, 0]
    assert [sent for _, sent in found] == [
        pytest.approx({"all-gather": first[0], "all-reduce": reduce * 100 * row}),
        pytest.approx({"all-gather": first[1] + again[1] + gather * 10 * row}),
        pytest.approx({"all-gather": first[2], "all-reduce": reduce * 11 * row}),
        pytest.approx({"all-gather": first[3], "all-reduce": reduce * 2 * row}),
        pytest.approx({"all-gather": first[4]}),
    ]


def test_tables_are_those_that_only_lookups_use() -> None:
    tables, refused = find_tables(Tied(12))
    assert tables == []
    assert refused == {"embed.weight": "it is tied to head.weight, whose gradient has every row"}
    model = nn.ModuleList([nn.Embedding(10, 4), nn.Embedding(10, 4), nn.Embedding(10, 4, sparse=True)])
    model[1].weight = model[0].weight
    model.append(nn.Embedding(3, 4).requires_grad_(False))
    tables, refused = find_tables(model)
    assert [(table.name, table.rows, table.row_bytes) for table in tables] == [("0.weight", 10, 16)]
    assert list(refused) == ["3.weight"]
    assert find_tables(model, smallest=161)[0] == []


def test_a_row_is_touched_by_any_number_but_zero() -> None:
    gradient = torch.zeros(7, 3)
    gradient[1, 2], gradient[3, 0], gradient[4, 1], gradient[6, 2] = 1.0, -1e-30, float("nan"), -0.0
    assert touched_rows(gradient).tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("layout", "more", "told"),
    [
        (
            "fsdp2",
            {},
            r'layout "fsdp2": run.sparse_rows is on, which is for replicas .* use dp2, or sparse_rows: auto',
        ),
        ("zero1x2", {}, r'layout "zero1x2": run.sparse_rows is on, which is for replicas .* use dp2'),
        ("pp2 dp2", {}, r'layout "pp2 dp2": run.sparse_rows is on, which is for replicas .* use dp4'),
        ("tp2", {}, r'layout "tp2": run.sparse_rows is on, and there are no replicas .* use dp2'),
        ("dp2", {"engine": "accelerate"}, r'on, which engine "accelerate" does not have; use engine native'),
        ("dp2", {"sparse_rows": "yes"}, r"run.sparse_rows is 'yes'; it should be 'auto', 'on' or 'off'"),
    ],
)
def test_what_can_not_be_had_is_refused(layout: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        samestep.verify(recipe(Recommender), layout=layout, **{"sparse_rows": "on", **more})


def test_a_method_of_its_own_refuses_rows() -> None:
    with pytest.raises(
        UserError, match=r"run.sparse_rows is on, and recipe.communication is bf16, .* use sparse_rows"
    ):
        samestep.verify(recipe(Recommender, communication={"kind": "bf16"}), layout="dp2", sparse_rows="on")


def test_models_without_such_an_embedding_are_refused(of_two: Mapping[str, Any]) -> None:
    assert of_two["tied"] == (
        "run.sparse_rows is on, and the model has no embedding that only lookups use (embed.weight: it is tied to "
        "head.weight, whose gradient has every row); use sparse_rows: auto"
    )
    assert "(there is no nn.Embedding)" in of_two["none"]


def test_yaml_reads_on_and_off_as_true_and_false(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for word, choice in {"on": "on", "off": "off", "auto": "auto", "true": "on"}.items():
        file.write_text(f"recipe: {{task: text-classification, batch: 8, epochs: 1}}\nrun: {{sparse_rows: {word}}}\n")
        loaded = jobfile.load(file)
        assert loaded.job.run.sparse_rows == choice
        file.write_text(jobfile.dump(loaded))
        assert jobfile.load(file).job.run.sparse_rows == choice
