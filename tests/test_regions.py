"""What becomes of a parameter that attentions or gated layers hold and use on their slices, spelled out."""

from collections.abc import Sequence

import pytest
import torch
from holding_nets import NETS, TOKENS, WORDS

from samestep.parallel.tensor.plan import make_plan
from samestep.parallel.tensor.regions import Regions, find_regions
from samestep.parallel.trace import trace

pytestmark = pytest.mark.quick

FIRST = "layers.0.attention"
ALL = [f"{FIRST}.{name}" for name in ("q", "k", "v", "out")]


def found(name: str, tried: dict[str, int] | None = None) -> Regions:
    model, words = NETS[name](), torch.randint(WORDS, (2, TOKENS))
    seen = trace(model, words)
    plan = make_plan(model, seen, ["layers.0", "layers.1"], 2)
    return find_regions(model, seen, plan, [], tried or {})


def of_first(names: Sequence[str]) -> list[str]:
    return sorted(name.removeprefix("layers.0.") for name in names if not name.startswith("layers.1."))


@pytest.mark.parametrize(
    ("name", "summed"),
    [
        ("scaled", ["attention.scaling"]),
        ("temperature", ["attention.temperature"]),
        ("biased", ["attention.bias"]),
        ("shared table", ["attention.table"]),
        ("normed", ["attention.norm.weight"]),
        ("convolved", ["attention.kernel"]),
        ("parametrized", ["attention.parametrizations.temperature.original"]),
        ("tied", ["attention.scaling"]),
        ("told", ["bias", "scale"]),
        ("gated by input", ["attention.gate.0.bias", "attention.gate.0.weight"]),
        ("perceptron", ["perceptron.all", "perceptron.slope"]),
    ],
)
def test_what_all_heads_share_has_its_gradients_summed(name: str, summed: list[str]) -> None:
    assert of_first([*found(name).summed]) == summed
    assert not found(name).refused


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("temperature of heads", {"attention.temperature": (0, [[(0, 2)], [(2, 4)]])}),
        ("biased by head", {"attention.bias": (0, [[(0, 2)], [(2, 4)]])}),
        ("table", {"attention.table": (1, [[(0, 2)], [(2, 4)]])}),
        ("told by head", {"bias": (1, [[(0, 2)], [(2, 4)]])}),
        ("perceptron", {"perceptron.each": (0, [[(0, 11)], [(11, 22)]])}),
        (
            "gated",
            {
                "attention.gates.0": (0, [[(0, 2)], [(2, 4)]]),
                "attention.gates.2": (0, [[(0, 2)], [(2, 4)]]),
                "attention.gates.3": (0, [[(0, 12)], [(12, 24)]]),
            },
        ),
    ],
)
def test_what_each_head_has_of_its_own_is_cut(name: str, cuts: dict[str, object]) -> None:
    regions = found(name)
    assert {key.removeprefix("layers.0."): cut for key, cut in regions.cuts.items() if "layers.1" not in key} == cuts
    assert not regions.refused


def test_what_no_choice_of_cuts_fits_is_summed_and_then_left_whole() -> None:
    tried: dict[str, int] = {}
    regions = found("table")
    assert regions.try_next(ALL, tried)
    assert of_first([*found("table", tried).summed]) == ["attention.table"]
    assert not regions.try_next(ALL, tried)
    assert not regions.try_next(["layers.0.perceptron.up"], tried)


def test_an_argument_that_is_used_elsewhere_too_is_copied_where_the_attention_begins() -> None:
    regions = found("told, in and out")
    # The scale is the second argument of the attention and the output layer's factor; the bias the third.
    assert {row: len(paths) for row, paths in regions.copied.items()} == {
        f"layers.{number}.attention.out": 2 for number in range(2)
    }
    assert not regions.refused
    assert not regions.entered
    assert not regions.summed


@pytest.mark.parametrize("name", ["gated by input", "averaging"])
def test_what_an_attention_computes_from_its_input_on_the_way_enters_with_it(name: str) -> None:
    regions = found(name)
    assert regions.entered == {f"layers.{number}.attention.out" for number in range(2)}
    assert not regions.refused


def test_a_parameter_with_gradients_of_both_kinds_leaves_its_unit_whole() -> None:
    refused = found("in and out").refused
    assert [name for name in refused if name.startswith(FIRST)] == ALL
    assert refused[ALL[0]] == (
        "uses layers.*.attention.scale on slices, where a rank's gradient is a part of the sum, and it is also used "
        "elsewhere, where every rank has the whole gradient"
    )
    assert {name.rpartition(".")[0] for name in found("perceptron, in and out").refused} == {
        f"layers.{number}.perceptron" for number in range(2)
    }


def test_what_no_unit_uses_is_left_alone() -> None:
    regions = found("plain")
    assert not regions.cuts
    assert not regions.summed
    assert not regions.refused
