"""A proof that fails names the kind of its first difference, where it is, and the module."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import mistakes
import pytest
from mistakes_of_pipelines import NothingHandedBack, OtherSamples
from small_tasks import Points

import samestep
from samestep import api
from samestep.data.loader import StepBatch
from samestep.engines.native.engine import Native
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.script_proof.kinds import Finding
from samestep.tasks.registry import resolve
from samestep.verification.departure import Looked, find, look
from samestep.verification.proof import proof_job

RECIPE = samestep.Recipe(
    task=Points(),
    batch=33,  # 17 samples for one rank, 16 for the other
    epochs=2,
    optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.1),
    schedule=samestep.Schedule(warmup=4, decay="cosine"),
)
PLAIN = replace(RECIPE, optimizer=samestep.SGD(lr=0.1))  # no averages of gradients, which its updates show


class Undivided(mistakes.NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * len(batch.micro_batches)


class NotDivided(Native):
    """Micro-batches' gradients are added up, and not divided by their number."""

    trainer_class = Undivided


@dataclass(frozen=True, kw_only=True)
class Case:
    engine: Native = field(default_factory=Native)
    layout: str = "dp2"
    recipe: samestep.Recipe = RECIPE
    micro_batch: int | None = None
    kind: str | None = None
    step: int = 1
    what: str = "gradient"
    module: str | None = None


CASES: Mapping[str, Case] = {
    "right": Case(),
    "right, sgd": Case(recipe=PLAIN),
    "right shards": Case(layout="fsdp2"),
    "right slices": Case(layout="tp2"),
    "right micro-batches": Case(micro_batch=4),
    "forward": Case(engine=mistakes.OtherForward(), kind="forward-differs", what="forward", module="1"),
    "forward of shards": Case(
        engine=mistakes.OtherForward(), layout="fsdp2", kind="forward-differs", what="forward", module="1"
    ),
    "gradient": Case(engine=mistakes.OtherGradient(), kind="some-gradients-scaled", module="4.weight"),
    "summed": Case(engine=mistakes.Summed(), kind="summed"),
    "summed, shards": Case(engine=mistakes.Summed(), layout="fsdp2", kind="summed"),
    "summed, sharded states": Case(engine=mistakes.Summed(), layout="zero1x2", kind="summed"),
    "summed, sgd": Case(engine=mistakes.Summed(), recipe=PLAIN, kind="summed"),
    "mean of means": Case(engine=mistakes.MeanOfMeans(), kind="mean-of-means"),
    "mean of means, sgd": Case(engine=mistakes.MeanOfMeans(), recipe=PLAIN, kind="mean-of-means"),
    "padded": Case(engine=mistakes.Padded(), kind="padded-sampler", what="samples"),
    "not divided": Case(engine=NotDivided(), micro_batch=4, kind="accumulation-divisor"),
    "other samples in a stage": Case(engine=OtherSamples(), layout="pp2", kind="gradients-differ"),
    "a stage learns nothing": Case(engine=NothingHandedBack(), layout="pp2", kind="missing-gradient", module="0"),
    "decay": Case(engine=mistakes.OtherDecay(), kind="weight-decay", what="optimizer"),
    "betas": Case(engine=mistakes.OtherBetas(), kind="optimizer-setting", what="optimizer"),
    "rate of one rank": Case(engine=mistakes.RateOfOneRank(), kind="learning-rate-differs", what="learning rate"),
    "schedule": Case(engine=mistakes.ForgottenSchedule(), kind="learning-rate", step=2, what="learning rate"),
    "weights": Case(
        engine=mistakes.OtherWeights(),
        kind="weights-not-broadcast",
        step=0,
        what="initial weights",
        module="0.weight",
    ),
}


def job(name: str) -> Job:
    case = CASES[name]
    run = Run(layout=case.layout, threads=1, engine=case.engine, micro_batch=case.micro_batch)
    return proof_job(Job(recipe=case.recipe, run=run))


def looked_for(known: Mapping[bool, Looked]) -> dict[str, Finding | None]:
    with join(device="cpu", threads=1) as world:
        found = {}
        for name, case in CASES.items():
            looked = known[case.recipe is PLAIN] if world.rank == 0 else None
            found[name] = find(job(name), resolve(RECIPE), world, Layout.parse(case.layout), 4, looked)
        return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding | None]:
    known = {
        plain: look(job("right, sgd" if plain else "right"), resolve(RECIPE), 4, tmp_path_factory.mktemp("looked"))
        for plain in (False, True)
    }
    return local.start(looked_for, (known,), 2)


def test_right_steps_depart_nowhere(found: Mapping[str, Finding | None]) -> None:
    assert {name: each for name, each in found.items() if name.startswith("right") and each} == {}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind is not None])
def test_the_first_difference_has_its_kind_and_place(found: Mapping[str, Finding | None], name: str) -> None:
    case, finding = CASES[name], found[name]
    assert finding is not None
    assert (finding.kind, finding.step, finding.what, finding.module) == (
        case.kind,
        case.step,
        case.what,
        case.module,
    )
    if case.kind == "forward-differs":
        # Of a row's two numbers the norm is 1e-3 apart, its product with a direction may be more.
        assert 1e-3 <= finding.relative < 3e-3


def test_words_have_the_numbers(found: Mapping[str, Finding | None]) -> None:
    lines = {name: finding.line for name, finding in found.items() if finding is not None}
    assert "2.000 times as large: summed over 2 ranks" in lines["summed"]
    assert "its own count (17, 16)" in lines["mean of means"]
    assert "repeats 1 samples" in lines["padded"]
    assert "weight decay is 0.1 instead of 0" in lines["decay"]


def test_verify_says_it() -> None:
    proof = samestep.verify(RECIPE, layout="dp2", steps=2, threads=1, engine=mistakes.OtherForward())
    assert not proof.same_step
    assert proof.departure is not None
    assert proof.to_json()["departure"]["module"] == "1"
    assert proof.to_json()["departure"]["kind"] == "forward-differs"
    assert proof.departure.line.startswith("step 1, forward of 1: for the same samples and weights this module gives")


def test_each_of_several_layouts_says_it() -> None:
    run = Run(threads=1, engine=mistakes.Summed(), check=False)
    rows = api.verify_layouts(Job(recipe=RECIPE, run=run), ["dp2", "recompute=full"], steps=2)
    kinds = {row.layout: row.proof.departure.kind for row in rows if row.proof is not None and row.proof.departure}
    assert kinds == {"dp2": "summed"}
    assert rows[0].words[0].startswith("dp2, first difference: step 1, gradient: gradients are 2.000 times as large")
    assert [row.verdict for row in rows] == ["NOT same", "same"]


def test_rounding_of_bfloat16_is_no_departure(tmp_path: Path) -> None:
    known = look(job("right"), resolve(RECIPE), 4, tmp_path)
    run = Run(layout="single", threads=1, micro_batch=5)
    in_bfloat16 = proof_job(Job(recipe=RECIPE, run=run), precision="bf16")
    with join(alone=True, device="cpu", threads=1) as world:
        assert find(in_bfloat16, resolve(RECIPE), world, Layout(), 4, known) is None
