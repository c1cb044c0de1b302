"""The table of models and layouts: a few of its pairs, how results are kept and judged, and its pages."""

import multiprocessing
import os
import sys
from pathlib import Path

import models
import pytest
from model_table import measure, page, result, second_look, shares
from model_table.declared import LAYOUTS, LAYOUTS_OF_DRAWN, impossible
from model_table.drawing import DRAWN, KNOWN, drawn, population
from model_table.entry import task_of
from model_table.random_types import made
from model_table.result import Result
from model_table.zoo import entries, entry_of
from resuming import job_of, largest_difference, train_all
from torch import nn

from samestep import AdamW, Checkpointing, Recipe
from samestep.layout import Layout

FILE_OF_TWO = (
    Result(model="llama", kind="decoder", layout="dp2", verdict="same step", difference=1e-15),
    Result(model="llama", kind="decoder", layout="tp2", verdict="refused", reason='layout "tp2": a.b has 3 heads'),
)


def test_there_are_forty_types_of_transformers_and_fifteen_other_models() -> None:
    chosen = [entry for entry in entries().values() if entry.half == "chosen"]
    own = [entry for entry in chosen if entry.loss is not None]
    assert (len(chosen) - len(own), len(own)) == (40, 17)
    assert len({*LAYOUTS}) == 21
    assert all(Layout.parse(layout).size <= 8 for layout in LAYOUTS)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_pair_takes_the_same_step_or_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.json"
    asked = ["--models", "gemma", "u-net", "--layouts", "tp2, cp2", "--steps", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", [models.__file__, *asked])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which the program adds to
    models.main()
    found = result.read(file)
    assert {pair: each.verdict for pair, each in found.items()} == {
        ("gemma", "tp2"): "same step",
        ("gemma", "cp2"): "same step",
        ("u-net", "tp2"): "same step",
        ("u-net", "cp2"): "refused",
    }
    refused = found["u-net", "cp2"]
    assert refused.impossible is not None
    assert not refused.miss
    assert refused.reason.startswith('layout "cp2": UNet has neither layers that hand on hidden states')


def test_a_pair_that_takes_too_long_is_stopped() -> None:
    (found,) = measure.measure(entries()["two-towers"], ["dp2"], steps=1, limit=0.001)
    assert found.verdict == "time limit"
    assert found.miss
    assert not multiprocessing.active_children()


def test_results_are_kept_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    assert result.read(file) == {}
    result.write(file, FILE_OF_TWO)
    assert tuple(result.read(file).values()) == FILE_OF_TWO
    assert result.rate(FILE_OF_TWO) == (1, 2)
    assert [(reason, len(group)) for reason, group in result.misses_by_reason(FILE_OF_TWO)] == [
        ("refused: M has N heads", 1)
    ]


@pytest.mark.parametrize(
    ("layout", "reason"), [("cp2", "no tokens"), ("dp2 cp2", "no tokens"), ("tp2", None), ("pp4", "its parts make 2")]
)
def test_what_is_impossible_is_declared(layout: str, reason: str | None) -> None:
    found = impossible(2, {"cp": "no tokens"}, layout)
    assert found is None if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize("language", page.PAGES)
def test_a_page_has_a_line_a_model_and_each_miss(language: str) -> None:
    assert "| llama | decoder | 1/2 | ✓ | – |" in page.table(FILE_OF_TWO, language)
    assert page.misses(FILE_OF_TWO, language).endswith('| 1 | – layout "tp2": a.b has 3 heads | llama |')


def test_types_are_drawn_by_a_seed_and_stand_for_all_of_their_stratum() -> None:
    assert drawn() == drawn.__wrapped__()
    assert drawn(seed=1) != drawn(seed=2)
    assert len({each.type for each in drawn()}) == DRAWN
    assert not KNOWN & {each.type for each in drawn()}
    for stratum, types in population().items():
        of_stratum = [each for each in drawn() if each.stratum == stratum]
        assert sum(each.stands_for for each in of_stratum) == pytest.approx(len(types))
        assert all(types[each.type][each.registry] == each.head for each in of_stratum)


@pytest.mark.parametrize("name", ["granite", "poolformer", "umt5"])
def test_a_type_is_built_tiny_and_given_rows_without_code_of_its_own(name: str) -> None:
    (kind,) = (each for each in drawn() if each.type == name)
    model, style = made(kind).model(), made(kind).style
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    entry = entries()[name]
    assert entry.collate([entry.row(0), entry.row(1)]).keys() == set(style.names)
    assert entry.model.__reduce__()[1] == (kind.head, made(kind).config)  # ranks needn't find it again


def test_every_library_has_a_task_and_its_models_are_built_only_when_they_are_used() -> None:
    of_libraries = [entry for entry in entries().values() if entry.half == "library"]
    assert len(of_libraries) == 20
    assert all(entry.loss is not None and "target" in entry.row(0) for entry in of_libraries)


def of_drawn(model: str, layout: str, verdict: result.Verdict, reason: str = "", **others: object) -> Result:
    return Result(model=model, kind="encoder", layout=layout, verdict=verdict, reason=reason, half="drawn", **others)  # pyright: ignore[reportArgumentType]


def test_shares_are_weighted_and_their_intervals_are_of_types() -> None:
    known = [
        of_drawn("a", "dp2", "same step", weight=3.0),
        of_drawn("a", "tp2", "same step", weight=3.0),
        of_drawn("b", "dp2", "same step", weight=1.0),
        of_drawn("b", "tp2", "refused", "no", weight=1.0),
        of_drawn("c", "dp2", "not made", "too large", weight=9.0),
    ]
    share = shares.of_pairs(known)
    assert share.value == pytest.approx((3 * 2 + 1) / (3 * 2 + 2))
    assert (share.low, share.high) == (0.5, 1.0)  # of the draws (a, a), (a, b), (b, b)
    assert shares.of_pairs(known, of_draw={"encoder": 2.0}) == share  # which is the same for all types of a kind
    assert shares.of_types(known)[:2] == (1, 2)
    wilson = shares.wilson(8, 10)
    # Newcombe 1998: both bounds solve (share - p)^2 = z^2 p (1 - p) / n
    for bound in (wilson.low, wilson.high):
        assert (0.8 - bound) ** 2 == pytest.approx(1.96**2 * bound * (1 - bound) / 10)


def test_a_second_look_removes_the_cause_or_follows_the_advice() -> None:
    padded = of_drawn("canine", "dp2", "refused", "padding must be masked, or all samples padded to one length")
    split = of_drawn("canine", "tp2 sequence=split", "refused", "its tokens can't be split; use sequence=whole")
    unknown = of_drawn("canine", "pp2", "refused", "no")
    name = "canine@rows of one length"
    assert second_look.pairs([padded, split, unknown]) == {name: ["dp2"]}
    tried = {(name, "dp2"): of_drawn(name, "dp2", "same step"), ("canine", "tp2"): of_drawn("canine", "tp2", "crash")}
    assert [second_look.verdict(each, tried) for each in (padded, split, unknown)] == [
        "✓ rows of one length",
        "≠ `tp2`",
        "?",
    ]


def test_causes_are_removed() -> None:
    entry = entry_of("umt5@rows of one length")
    lengths = {tuple(len(value) for value in entry.row(index).values()) for index in range(6)}
    assert lengths == {(7, 7, 5)}
    model = entry_of("detector@group norm").model()
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert any(isinstance(module, nn.GroupNorm) for module in model.modules())


@pytest.mark.parametrize("language", page.PAGES)
def test_the_pages_show_the_drawn_types(language: str) -> None:
    known = [
        of_drawn("granite", "dp2", "same step", prepared=1.5),
        of_drawn("granite", "tp2", "refused", 'layout "tp2": no; use sequence=whole', prepared=1.5),
        of_drawn("reformer", "dp2", "not made", "ValueError: <factors>"),
    ]
    text = page.share_of_drawn(known, language)
    assert "**50.0 %**" in text
    assert str(len(population()["decoder"]) + len(population()["encoder"])) in text  # the kinds that are measured
    assert '| 1 | – layout "tp2": no; use sequence=whole | granite | ? |' in page.looked_at(known, {}, language)
    assert "| reformer | encoder | ValueError: &lt;factors> |" in page.not_made(known, language)


def test_the_twin_has_every_pair_of_the_page() -> None:
    known = result.read(page.TWIN)
    models = {each.model for each in known.values() if each.half == "drawn" and second_look.MARK not in each.model}
    assert models <= {each.type for each in drawn()}
    assert len(models) > 20
    for model in models:
        assert {layout for name, layout in known if name == model} >= {*LAYOUTS_OF_DRAWN}
    assert "NOT the same step" not in {each.verdict for each in known.values()}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_drawn_types_are_saved_and_resumed_under_another_layout(tmp_path: Path) -> None:
    ways = {"granite": ("dp2", "fsdp2"), "poolformer": ("fsdp2", "tp2"), "umt5": ("pp2", "zero1x2")}
    recipes = {
        name: Recipe(task=task_of(entries()[name]), batch=6, steps=4, precision="fp64", optimizer=AdamW(lr=1e-3))
        for name in ways
    }
    alone = train_all([job_of(recipe, "single", tmp_path / name / "alone") for name, recipe in recipes.items()])
    saving = [
        job_of(recipes[name], first, tmp_path / name / "from", checkpoint=Checkpointing(every=2))
        for name, (first, _) in ways.items()
    ]
    saved = [result.folder / "checkpoints" / "step-2" for result in train_all(saving) if result.folder is not None]
    resumed = train_all(
        [
            job_of(recipes[name], other, tmp_path / name / "to", checkpoint=Checkpointing(resume=str(folder)))
            for (name, (_, other)), folder in zip(ways.items(), saved, strict=True)
        ]
    )
    for result_alone, result_resumed in zip(alone, resumed, strict=True):
        assert result_resumed.first_step == 2
        assert largest_difference(result_resumed.losses, result_alone.losses[2:]) < 1e-9
