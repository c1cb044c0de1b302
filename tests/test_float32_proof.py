"""Proofs in float32 and bfloat16: right steps pass by the rounding that was measured, planted mistakes do not."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from float32_mistakes import (
    MISTAKES,
    SUMMED,
    Float32,
    PlantedAccelerate,
    PlantedDataParallel,
    PlantedDeepSpeed,
    PlantedHorovod,
    PlantedMirrored,
    PlantedMultiWorker,
    PlantedParameterServer,
)
from proving import Case, prove
from small_tasks import Lines, Points

import samestep
from samestep.engines.base import Engine
from samestep.job import Job, Run
from samestep.training.rounding import RoundingFound, measure, share_of_rounding, worst_of
from samestep.verification.proof import Proof, proof_job

EVERY = ("", *MISTAKES, SUMMED)  # "": none
POINTS = samestep.Recipe(
    task=Points(),
    batch=33,
    steps=8,
    optimizer=samestep.AdamW(lr=1e-2),
    schedule=samestep.Schedule(warmup=2, decay="cosine"),
)
LINES = samestep.Recipe(task=Lines(), batch=33, steps=8, optimizer=samestep.AdamW(lr=1e-2), clip=0.5)
SGD = samestep.Recipe(task=Points(), batch=33, steps=8, optimizer=samestep.SGD(lr=0.1, momentum=0.9))


def found(cases: Mapping[str, Case], *, precision: str = "fp32") -> dict[str, RoundingFound]:
    """What was found of each case, whose verdict is what it says."""
    rounding: dict[str, RoundingFound] = {}
    for name, proof in prove(cases, steps=5, precision=precision).items():
        assert isinstance(proof, Proof), proof
        assert proof.dtype == {"fp32": "float32", "bf16": "bfloat16"}[precision]
        assert proof.rounding is not None
        rounding[name] = proof.rounding
        wrong = [proof.max_relative_difference[each] for each in ("loss", "grad_norm")]
        assert proof.same_step is (proof.rounding.same and max(wrong) < proof.tolerance)
        assert proof.to_json()["rounding"]["same"] is proof.rounding.same
        assert proof.rounding.words() in proof.words()
    return rounding


def check(rounding: Mapping[str, RoundingFound]) -> None:
    """The right one has a tenth of what is allowed at most, a wrong one ten times as much at least.

    Beside the optimizer's rule, where rounding is not measured but computed, the right one has a half.
    """
    for name, each in rounding.items():
        state = each.optimizer_state
        assert state is not None, name
        assert each.update is not None, name
        if name.endswith(": "):
            assert max(each.parameters, state) < 0.1, (name, each)
            assert each.update < 0.5, (name, each)
        else:
            assert max(each.parameters, state) > 10, (name, each)


def check_in_bfloat16(rounding: Mapping[str, RoundingFound]) -> None:
    """Mistakes in the optimizer's settings are seen beside its rule; gradients twice as large beside rounding."""
    for name, each in rounding.items():
        assert each.update is not None, name
        mistake = name.partition(": ")[2]
        assert each.same is (not mistake), (name, each)
        if mistake in MISTAKES:
            assert each.update > 5, (name, each)
        else:
            assert each.update < 0.5, (name, each)


@pytest.mark.slow  # bfloat16's three below stay fast
@pytest.mark.parametrize("kind", [Float32, PlantedAccelerate])
def test_planted_mistakes_are_seen(kind: type[Float32] | type[PlantedAccelerate]) -> None:
    engines: dict[str, Engine] = {mistake: kind(mistake) for mistake in EVERY}
    rounding = found({f"points: {mistake}": (POINTS, "dp2", {"engine": each}) for mistake, each in engines.items()})
    check(rounding)


@pytest.mark.parametrize(
    ("kind", "mistakes"),
    [
        (Float32, ("", "decay on biases", SUMMED)),
        pytest.param(Float32, EVERY, marks=pytest.mark.slow),
        pytest.param(PlantedAccelerate, EVERY, marks=pytest.mark.slow),
    ],
)
def test_planted_mistakes_are_seen_in_bfloat16(
    kind: type[Float32] | type[PlantedAccelerate], mistakes: Sequence[str]
) -> None:
    engines: dict[str, Engine] = {mistake: kind(mistake) for mistake in mistakes}
    cases: dict[str, Case] = {f"points: {name}": (POINTS, "dp2", {"engine": each}) for name, each in engines.items()}
    check_in_bfloat16(found(cases, precision="bf16"))


Planted = type[PlantedDataParallel] | type[PlantedParameterServer] | type[PlantedMirrored] | type[PlantedMultiWorker]


def of_engine(
    kind: Planted, layout: str, mistakes: Sequence[str] = EVERY, recipe: samestep.Recipe = POINTS
) -> dict[str, Case]:
    return {f"{layout}: {mistake}": (recipe, layout, {"engine": kind(mistake)}) for mistake in mistakes}


@pytest.mark.slow
def test_planted_mistakes_are_seen_under_a_parameter_server() -> None:
    """Three mistakes, of which one shows in the server's state alone; the other ones are slow, and like these."""
    check(found(of_engine(PlantedParameterServer, "dp3", ("", "no decay", SUMMED))))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "layout"), [(PlantedDataParallel, "single"), (PlantedParameterServer, "dp3")])
def test_planted_mistakes_are_seen_under_other_engines(kind: Planted, layout: str, precision: str) -> None:
    judge = check if precision == "fp32" else check_in_bfloat16
    judge(found(of_engine(kind, layout), precision=precision))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="pip install 'samestep[tensorflow]'")
@pytest.mark.parametrize(("kind", "layout"), [(PlantedMirrored, "single"), (PlantedMultiWorker, "dp2")])
def test_planted_mistakes_are_seen_under_tensorflow(kind: Planted, layout: str) -> None:
    recipe = replace(POINTS, task="regression", args={"samples": 200})  # eps shows beside the rule alone
    for name, each in found(of_engine(kind, layout, recipe=recipe)).items():
        assert each.optimizer_state is not None, name
        assert each.update is not None, name
        worst = max(each.parameters, each.optimizer_state, each.update)
        assert worst < 0.5 if name.endswith(": ") else worst > 10, (name, each)


@pytest.mark.slow
def test_padded_lines_and_sgd_pass() -> None:
    recipes = {"lines": LINES, "sgd": SGD}
    check(found({f"{name}: ": (recipe, "dp2", {"engine": Float32()}) for name, recipe in recipes.items()}))


@pytest.mark.slow
def test_what_keeps_its_state_in_shards_is_judged_by_parameters() -> None:
    cases: dict[str, Case] = {
        mistake: (POINTS, "fsdp2", {"engine": Float32(mistake)}) for mistake in ("", "wrong eps")
    }
    rounding = found(cases)
    assert [each.optimizer_state for each in rounding.values()] == [None] * 2
    assert [each.same for each in rounding.values()] == [True, False]
    assert "can't be read of this engine" in rounding[""].words()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "zero1x2", "zero2x2", "fsdp2"])
def test_planted_mistakes_are_seen_under_deepspeed(layout: str) -> None:
    cases: dict[str, Case] = {
        f"{layout}: {mistake}": (POINTS, layout, {"engine": PlantedDeepSpeed(mistake)}) for mistake in EVERY
    }
    check(found(cases))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'")
@pytest.mark.parametrize("layout", ["dp2", "zero1x2", "zero2x2", "fsdp2"])
def test_planted_mistakes_are_seen_under_deepspeed_in_bfloat16(layout: str) -> None:
    cases: dict[str, Case] = {
        f"{layout}: {mistake}": (POINTS, layout, {"engine": PlantedDeepSpeed(mistake)}) for mistake in EVERY
    }
    check_in_bfloat16(found(cases, precision="bf16"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built; use make horovod")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planted_mistakes_are_seen_under_horovod(precision: str) -> None:
    judge = check if precision == "fp32" else check_in_bfloat16
    cases: dict[str, Case] = {f"dp2: {each}": (POINTS, "dp2", {"engine": PlantedHorovod(each)}) for each in EVERY}
    judge(found(cases, precision=precision))


@pytest.mark.quick
def test_what_a_proof_is_asked_for_and_can_not_be_is_told() -> None:
    job = Job(recipe=POINTS, run=Run(layout="dp2"))
    assert proof_job(job).recipe.precision == "fp64"
    assert proof_job(job, precision="bf16").recipe.precision == "bf16"
    with pytest.raises(samestep.UserError, match="a proof in fp16: use fp64, fp32, bf16"):
        proof_job(job, precision="fp16")
    with pytest.raises(
        samestep.UserError, match='a proof in fp64, which engine "native" does not have; use fp32, bf16'
    ):
        proof_job(Job(recipe=POINTS, run=Run(layout="dp2", engine=Float32())), precision="fp64")


@pytest.mark.quick
def test_a_tensor_that_was_lucky_is_allowed_what_others_are() -> None:
    before = {"a": torch.zeros(100), "b": torch.zeros(1)}
    exact = {name: torch.full_like(value, 0.5, dtype=torch.float64) for name, value in before.items()}
    run = {"a": exact["a"] + 1e-6, "b": exact["b"]}
    typical = measure(exact, before, [run, exact], {})
    assert typical["a"] == pytest.approx(1e-6)
    assert typical["b"] == pytest.approx(0.5e-6)  # the median of 1e-6 and 0
    still = measure(exact, exact, [exact], {})
    assert still["a"] == pytest.approx(0.5 * 2.0**-24)  # what float32 rounds of it, in any case


@pytest.mark.quick
def test_what_the_rounding_of_a_gradient_moves_is_taken_off() -> None:
    theirs = torch.zeros(2, dtype=torch.float64)
    move = torch.tensor([0.0, 1e-2], dtype=torch.float64)
    assert share_of_rounding(torch.tensor([0.0, 9e-3]), theirs, move, 1e-9) == 0
    assert share_of_rounding(torch.tensor([9e-3, 0.0]), theirs, move, 1e-9) > 1000
    assert share_of_rounding(torch.tensor([math.nan, 0.0]), theirs, move, 1e-9) == math.inf
    assert share_of_rounding(torch.zeros(3), theirs, move, 1e-9) == math.inf


@pytest.mark.quick
def test_the_worst_of_several_ranks_counts() -> None:
    one = RoundingFound(parameters=0.5, worst_parameter="a", optimizer_state=0.1, worst_state="a (exp_avg)")
    other = RoundingFound(parameters=0.1, worst_parameter="b", optimizer_state=3.0, worst_state="b (exp_avg)")
    assert worst_of([]) is None
    worst = worst_of([one, other])
    assert worst is not None
    assert (worst.worst_parameter, worst.worst_state, worst.same) == ("a", "b (exp_avg)", False)
