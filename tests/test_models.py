"""The table of models and layouts: a few of its pairs, how results are kept and judged, and its pages."""

import multiprocessing
import os
import sys
from pathlib import Path

import models
import pytest
from model_table import measure, page, result
from model_table.declared import LAYOUTS, impossible
from model_table.result import Result
from model_table.zoo import entries

from samestep.layout import Layout

FILE_OF_TWO = (
    Result(model="llama", kind="decoder", layout="dp2", verdict="same step", difference=1e-15),
    Result(model="llama", kind="decoder", layout="tp2", verdict="refused", reason='layout "tp2": a.b has 3 heads'),
)


def test_there_are_forty_types_of_transformers_and_fifteen_other_models() -> None:
    own = [entry for entry in entries().values() if entry.loss is not None]
    assert (len(entries()) - len(own), len(own)) == (40, 17)
    assert len({*LAYOUTS}) == 21
    assert all(Layout.parse(layout).size <= 8 for layout in LAYOUTS)


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
