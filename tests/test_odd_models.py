"""Odd models under layouts: the same step, or one sentence that is true; never a traceback of PyTorch's."""

from collections.abc import Mapping
from typing import Any

import pytest
from odd_models import Odd
from proving import Case, prove, same

import samestep
from samestep.verification.proof import Proof

pytestmark = pytest.mark.timeout(400)


def recipe(name: str) -> samestep.Recipe:
    task = Odd(name=name)
    return samestep.Recipe(task=task, batch=7, clip=0.5, dropout=False, optimizer=samestep.AdamW(lr=1e-2))


WORKS: Mapping[str, tuple[str, ...]] = {
    "scalars": ("fsdp2", "fsdp2 recompute=full", "fsdp2 offload=parameters", "zero1x2", "pp2", "tp2"),
    "gains": ("fsdp2", "tp2", "tp2 sequence=split", "pp2"),
    "views": ("pp2", "fsdp2", "tp2"),
    "asks parameters": ("pp2",),
    "lists": ("fsdp2", "fsdp2 recompute=full"),
    "methods": ("fsdp2",),
    "used elsewhere": ("fsdp2", "tp2", "tp2 sequence=split"),
    "by value": ("fsdp2",),
    "experts": ("fsdp2", "tp2", "tp2 sequence=split", "pp2"),
    "transposed": ("fsdp2", "dp2", "zero1x2", "pp2"),
    "objects": ("fsdp2", "tp2", "pp2"),
    "bare": ("fsdp2",),
    "states": ("fsdp2", "pp2"),
    "passed on": ("fsdp2", "pp2"),
    "cached": ("fsdp2", "pp2", "tp2"),
    "chosen": ("fsdp2", "zero2x2", "zero1x2", "fsdp2 tp2"),
    "shared": ("fsdp2", "tp2", "pp2"),
    "gates of a layer": ("pp2",),
    "detached gates of a layer": ("pp2",),
    "gates of words": ("fsdp2", "pp2"),
    "own gradient": ("fsdp2", "zero2x2", "pp2"),
    "penalized": ("dp2", "zero1x2"),
    "detached gates of words": ("fsdp2", "pp2"),
    "weight norm": ("fsdp2 recompute=full", "tp2", "pp2"),
    "orthogonal": ("fsdp2 recompute=full", "tp2", "pp2"),
    "old weight norm": ("fsdp2 recompute=full", "tp2", "pp2"),
    "spectral norm": ("dp2", "fsdp2", "tp2", "pp2", "fsdp2 recompute=full"),
    "old spectral norm": ("fsdp2", "tp2"),
    "hooked": ("dp2", "zero1x2"),
    "cancelling": ("dp2", "fsdp2"),
    "in place": ("dp2", "fsdp2", "pp2"),
    "writes to its input": ("fsdp2", "dp2", "zero1x2", "pp2", "tp2"),
    "crossed": ("tp2", "pp2"),
    "checkpointed": ("fsdp2",),
    "recomputed": (
        "pp2",
        "pp2 schedule=zbv-zero-bubble",
        "pp2 schedule=interleaved-zero-bubble",
        "pp2 recompute=full",
        "fsdp2",
        "tp2",
    ),
    "recomputed together": ("fsdp2", "dp2"),
    "packed": ("tp2", "fsdp2", "cp2"),
    "called by functions": ("dp2",),
    "layers with functions": ("pp2", "dp2"),
    "bloom": ("pp2", "tp2", "cp2"),
    "rescaled": ("pp2",),
    "graphs": ("pp2", "tp2", "fsdp2"),
    "bart": ("cp2",),
    "bart as long": ("cp2",),
    "bart by chance": ("cp2",),
    "hidden": ("tp2",),
    "mixed": ("tp2",),
    "reshaped": ("tp2",),
    "swin": ("pp2", "cp2", "tp2 sequence=split"),
}
# Fast tests prove one model of each kind of oddity under one of its layouts, the first one along every axis.
FAST: Mapping[str, tuple[str, ...]] = {
    "scalars": ("fsdp2 recompute=full", "pp2", "tp2"),
    "writes to its input": ("fsdp2",),
    "experts": ("tp2 sequence=split",),
    "shared": ("pp2",),
    "views": ("pp2",),
    "asks parameters": ("pp2",),
    "chosen": ("fsdp2",),
    "own gradient": ("zero2x2",),
    "layers with functions": ("pp2",),
    "recomputed": ("pp2", "pp2 schedule=zbv-zero-bubble"),
    "packed": ("tp2",),
    "penalized": ("zero1x2",),
    "weight norm": ("tp2",),
    "cancelling": ("dp2",),
}
# Those that are also proved with whole parameters and sharded gradients, by a slow test.
ZERO2 = (
    "scalars",
    "lists",
    "methods",
    "used elsewhere",
    "by value",
    "experts",
    "transposed",
    "objects",
    "bare",
    "in place",
)
AS_TOLD = {"layers.*.up": "whole", "layers.*.down": "whole"}
MOVED_ON = "is moved on by every training forward, and"
REFUSED: Mapping[str, tuple[str, str, dict[str, Any], str]] = {
    "old spectral norm recomputed": ("old spectral norm", "fsdp2 recompute=full", {}, MOVED_ON),
    "old spectral norm in a pipeline": ("old spectral norm", "pp2", {}, MOVED_ON),
    **{
        f"penalized, {layout}": (
            "penalized",
            layout,
            {},
            "takes gradients through layers.2 (Layer), whose parameters",
        )
        for layout in ("fsdp2", "zero2x2")
    },
    "methods in a pipeline": (
        "methods",
        "pp2",
        {},
        "layers.0 and the like are not called, so there is none",
    ),
    **{
        f"a hook on a gradient, {layout}": ("hooked", layout, {}, "layers.0.up.weight has a hook on its gradient")
        for layout in ("fsdp2", "zero2x2", "tp2", "pp2")
    },
    "a backward in a backward": (
        "checkpointed",
        "dp2",
        {},
        "as torch.utils.checkpoint does with use_reentrant=True, and gradients are averaged once a backward; use "
        'checkpoint(..., use_reentrant=False), or in place of the model\'s own checkpointing "dp2 recompute=full"',
    ),
    "layers in a backward of their own, in a pipeline": (
        "checkpointed",
        "pp2",
        {},
        "torch.utils.checkpoint with use_reentrant=True calls layers.0, and takes its gradient in a backward of its "
        "own, so no pipeline stage can; use checkpoint(..., use_reentrant=False), or in place of the model's own "
        'checkpointing "pp2 recompute=full"',
    ),
    "layers called by a function, in a pipeline": (
        "called by functions",
        "pp2",
        {},
        "the autograd.Function Rebuilt calls layers.0, and takes its gradient in a backward of its own, so no "
        "pipeline stage can; use dp2",
    ),
    "rows without tokens": (
        "pooled",
        "tp2 sequence=split",
        {"tensor_plan": {"embed": "whole", "head": "whole"}},
        "layers.0.up takes [2, 12], which is not [samples, tokens, features]",
    ),
    "a plan that is wrong": (
        "hidden",
        "tp2",
        {"tensor_plan": {"layers.0.up": "column", "layers.0.down": "row"}},
        "sliced, layers.0.down (Linear) gives another output than whole; use run.tensor_plan: "
        '{"layers.0.up": column, "layers.0.down": row, "layers.*.up": whole, "layers.*.down": whole}',
    ),
}
# What fast tests find refused for the same reason under another layout.
MORE_REFUSED = (
    "old spectral norm recomputed",
    "old spectral norm in a pipeline",
    "penalized, zero2x2",
    *(f"a hook on a gradient, {layout}" for layout in ("fsdp2", "zero2x2", "tp2")),
)


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    refused = {case: values for case, values in REFUSED.items() if case not in MORE_REFUSED}
    recipes = {name: recipe(name) for name in {*FAST, *(name for name, *_ in refused.values())}}
    cases: dict[str, Case] = {
        f"{name}: {layout}": (recipes[name], layout, {}) for name, layouts in FAST.items() for layout in layouts
    }
    cases |= {case: (recipes[name], layout, run) for case, (name, layout, run, _) in refused.items()}
    cases["as it was told"] = (recipes["hidden"], "tp2", {"tensor_plan": AS_TOLD})
    whole = {"tensor_plan": {"embed": "whole", "head": "whole"}}
    cases["computed weights"] = (recipe("orthogonal"), "tp2 sequence=split", whole)
    return prove(cases, steps=2)


@pytest.mark.slow
def test_an_odd_model_takes_the_same_step_with_gradients_sharded_alone() -> None:
    cases: dict[str, Case] = {name: (recipe(name), "zero2x2", {}) for name in ZERO2}
    assert same(prove(cases, steps=2), ZERO2) == {}


@pytest.mark.slow
def test_an_odd_model_takes_the_same_step_under_every_layout() -> None:
    rest = {name: [each for each in layouts if each not in FAST.get(name, ())] for name, layouts in WORKS.items()}
    recipes = {name: recipe(name) for name in rest}
    cases: dict[str, Case] = {
        f"{name}: {layout}": (recipes[name], layout, {}) for name, layouts in rest.items() for layout in layouts
    }
    assert same(prove(cases, steps=2), list(cases)) == {}


@pytest.mark.parametrize("name", FAST)
def test_an_odd_model_takes_the_same_step(name: str, proofs: Mapping[str, Proof | str]) -> None:
    assert same(proofs, [f"{name}: {layout}" for layout in FAST[name]]) == {}


@pytest.mark.slow
def test_an_odd_model_takes_the_same_step_on_four_ranks() -> None:
    bloom = recipe("bloom")  # whose first layer gives a stage of another size than what it takes
    cases: dict[str, Case] = {layout: (bloom, layout, {}) for layout in ("pp2 tp2", "fsdp2 cp2")}
    assert same(prove(cases, steps=2), list(cases)) == {}


def test_what_a_refusal_says_works(proofs: Mapping[str, Proof | str]) -> None:
    assert same(proofs, ["as it was told"]) == {}


def test_weights_that_are_computed_before_each_use_take_the_same_step(proofs: Mapping[str, Proof | str]) -> None:
    assert same(proofs, ["computed weights"]) == {}


def assert_refused(case: str, said: Proof | str) -> None:
    assert isinstance(said, str), said
    assert REFUSED[case][3] in said
    assert "\n" not in said


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in MORE_REFUSED])
def test_what_can_not_be_the_same_step_is_refused_with_the_reason(
    case: str, proofs: Mapping[str, Proof | str]
) -> None:
    assert_refused(case, proofs[case])


@pytest.mark.slow
def test_it_is_refused_under_every_such_layout() -> None:
    given = {case: REFUSED[case] for case in MORE_REFUSED}
    recipes = {name: recipe(name) for name, *_ in given.values()}
    found = prove({case: (recipes[name], layout, run) for case, (name, layout, run, _) in given.items()}, steps=2)
    for case in MORE_REFUSED:
        assert_refused(case, found[case])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "recomputed together",
            "the model's own checkpointing computes layers.0 again together with layers of another pipeline stage "
            "than its own; use recompute=full in place of it, or a checkpoint around each layer alone",
        ),
        (
            "packed",
            "a pipeline needs a shape that no value decides); use dp2, which leaves the model whole on every rank",
        ),
    ],
)
def test_what_no_pipeline_stage_can_hand_on_or_compute_again_is_told(name: str, said: str) -> None:
    with pytest.raises(samestep.UserError) as caught:
        samestep.verify(recipe(name), layout="pp2", steps=1, threads=1)
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("fails in ranks", "fsdp2", "; use dp2, which leaves the model whole on every rank"),
        pytest.param("fails on one rank", "dp2 recompute=full", '; use "dp2"', marks=pytest.mark.slow),
        pytest.param("fails in backward", "dp2", "; use one process", marks=pytest.mark.slow),
    ],
)
def test_what_fails_below_a_layout_is_one_sentence(name: str, layout: str, said: str) -> None:
    where = "layers.1 (Failing)" if name != "fails in backward" else "Net"
    with pytest.raises(samestep.UserError) as caught:
        samestep.verify(recipe(name), layout=layout, steps=1, threads=1)
    message = str(caught.value)
    assert message.startswith(f'layout "{layout}": {where} fails when the model is spread so (RuntimeError: planted')
    assert message.endswith(said)
    assert "\n" not in message
