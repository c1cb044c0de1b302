"""A proof that fails names the first module that departs, and where: forward, gradient or update."""

from collections.abc import Mapping
from pathlib import Path

import mistakes
import pytest
from small_tasks import Points

import samestep
from samestep.engines.native.engine import Native
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.registry import resolve
from samestep.verification.departure import Departure, Looked, find, look
from samestep.verification.proof import proof_job

RECIPE = samestep.Recipe(
    task=Points(),
    batch=32,
    epochs=2,
    optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.1),
    schedule=samestep.Schedule(warmup=4, decay="cosine"),
)
CASES: Mapping[str, tuple[Native, str]] = {
    "right": (Native(), "dp2"),
    "right shards": (Native(), "fsdp2"),
    "right slices": (Native(), "tp2"),
    "forward": (mistakes.OtherForward(), "dp2"),
    "forward of shards": (mistakes.OtherForward(), "fsdp2"),
    "gradient": (mistakes.OtherGradient(), "dp2"),
    "summed": (mistakes.Summed(), "dp2"),
    "decay": (mistakes.OtherDecay(), "dp2"),
    "schedule": (mistakes.ForgottenSchedule(), "dp2"),
    "weights": (mistakes.OtherWeights(), "dp2"),
}


def job(name: str) -> Job:
    engine, layout = CASES[name]
    return proof_job(Job(recipe=RECIPE, run=Run(layout=layout, threads=1, engine=engine)))


def looked_for(known: Looked) -> dict[str, Departure | None]:
    with join(device="cpu", threads=1) as world:
        return {
            name: find(job(name), resolve(RECIPE), world, Layout.parse(layout), 4, known if world.rank == 0 else None)
            for name, (_, layout) in CASES.items()
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Departure | None]:
    known = look(job("right"), resolve(RECIPE), 4, tmp_path_factory.mktemp("looked"))
    return local.start(looked_for, (known,), 2)


def test_right_steps_depart_nowhere(found: Mapping[str, Departure | None]) -> None:
    assert {name: each for name, each in found.items() if name.startswith("right") and each} == {}


@pytest.mark.parametrize(
    ("name", "step", "what", "module", "relative"),
    [
        ("forward", 1, "forward", "1", 1e-3),
        ("forward of shards", 1, "forward", "1", 1e-3),
        ("gradient", 1, "gradient", "4.weight", None),
        ("summed", 1, "gradient", None, None),
        ("decay", 1, "parameters", None, None),
        ("schedule", 2, "parameters", None, None),
        ("weights", 1, "forward", "0", None),
    ],
)
def test_the_first_departure_is_named(
    found: Mapping[str, Departure | None], name: str, step: int, what: str, module: str | None, relative: float | None
) -> None:
    departure = found[name]
    assert departure is not None
    assert (departure.step, departure.what, departure.module) == (step, what, module)
    if relative is not None:
        # Of a row's two numbers the norm is 1e-3 apart, its product with a direction may be more.
        assert relative <= departure.relative < 3 * relative


def test_verify_says_it() -> None:
    proof = samestep.verify(RECIPE, layout="dp2", steps=2, threads=1, engine=mistakes.OtherForward())
    assert not proof.same_step
    assert proof.departure is not None
    assert proof.to_json()["departure"]["module"] == "1"
    assert proof.departure.words() in proof.words()
    assert proof.departure.words().startswith("first difference: step 1, forward of 1 (relative 0.001")


def test_rounding_of_bfloat16_is_no_departure(tmp_path: Path) -> None:
    known = look(job("right"), resolve(RECIPE), 4, tmp_path)
    run = Run(layout="single", threads=1, micro_batch=5)
    in_bfloat16 = proof_job(Job(recipe=RECIPE, run=run), precision="bf16")
    with join(alone=True, device="cpu", threads=1) as world:
        assert find(in_bfloat16, resolve(RECIPE), world, Layout(), 4, known) is None
