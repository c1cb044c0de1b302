"""Many proofs in one start of ranks, since a start takes longer than a proof of a tiny model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import samestep
from samestep.comm.group_pool import GroupPool
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.parallel_model import Findings
from samestep.tasks.registry import resolve
from samestep.verification.noise import NoiseMeasurement
from samestep.verification.proof import Proof, Reference, hold_against, proof_job, reference

STEPS = 3

Case = tuple[samestep.Recipe, str, Mapping[str, Any]]  # what is trained, its layout, and the run's other settings


def prove(
    cases: Mapping[str, Case], *, steps: int = STEPS, dropout: bool = False, precision: str | None = None
) -> dict[str, Proof | str]:
    """By name of a case, its proof; or the message of the user error that came instead.

    There is one start of ranks for each size of layouts. `dropout`: as the models have it; else it is switched off.
    """
    given = {
        name: Job(recipe=recipe, run=Run(layout=layout, threads=1, **run))
        for name, (recipe, layout, run) in cases.items()
    }
    jobs = {name: proof_job(job, dropout=dropout, precision=precision) for name, job in given.items()}
    with TemporaryDirectory(prefix="samestep-references-") as folder:
        known: dict[str, Reference] = {}
        by_recipe: dict[int, Reference] = {}
        for number, (name, job) in enumerate(jobs.items()):
            recipe = id(cases[name][0])
            if recipe not in by_recipe:
                place = Path(folder) / str(number)
                place.mkdir()
                by_recipe[recipe] = reference(job, resolve(job.recipe), steps, place)
            known[name] = by_recipe[recipe]
        recipes = {name: id(cases[name][0]) for name in jobs}
        sizes: dict[int, dict[str, Job]] = {}
        for name, job in jobs.items():
            sizes.setdefault(Layout.parse(job.run.layout).size, {})[name] = job
        proofs: dict[str, Proof | str] = {}
        for size, mine in sizes.items():
            proofs |= local.start(_on_each_rank, (mine, {name: known[name] for name in mine}, recipes, steps), size)
        noise: dict[int, NoiseMeasurement] = {}  # by recipe
        for name, proof in proofs.items():
            if isinstance(proof, Proof) and proof.wants_noise():
                recipe, job = recipes[name], jobs[name]
                if recipe not in noise:
                    noise[recipe] = NoiseMeasurement(job, resolve(job.recipe), steps, known[name])
                proofs[name] = proof.held_against_noise(noise[recipe])
        return proofs


def prove_alone(recipe: samestep.Recipe, *, steps: int, dropout: bool = False) -> Proof:
    """One process held against the reference and the model as built, which `samestep.verify` refuses."""
    job = proof_job(Job(recipe=recipe, run=Run(threads=1)), dropout=dropout)
    task = resolve(recipe)
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        known = reference(job, task, steps, Path(folder))
        with join(alone=True, device="cpu", threads=1) as world:
            return hold_against(job, task, world, Layout(), steps, known)


def _on_each_rank(
    jobs: Mapping[str, Job], known: Mapping[str, Reference], recipes: Mapping[str, int], steps: int
) -> dict[str, Proof | str]:
    """Prove one case after another; those of one recipe share its traces, as `samestep verify --layouts` has it."""
    found: dict[str, Proof | str] = {}
    traces: dict[int, Findings] = {}
    groups = GroupPool()
    with join(device="cpu", threads=1) as world:
        for name, job in jobs.items():
            try:
                layout = Layout.parse(job.run.layout)
                mine = known[name] if world.rank == 0 else None
                findings = traces.setdefault(recipes[name], Findings()).of_model()
                with groups.lent():
                    found[name] = hold_against(job, resolve(job.recipe), world, layout, steps, mine, findings)
            except samestep.UserError as error:  # on every rank alike
                found[name] = str(error)
    return found


def same(proofs: Mapping[str, Proof | str], names: Sequence[str]) -> dict[str, Any]:
    """What stands where a proof that the step is the same should stand; empty where all is well."""
    return {name: proofs[name] for name in names if getattr(proofs[name], "same_step", False) is not True}


def assert_same_steps(cases: Sequence[Case], *, steps: int, dropout: bool = False) -> None:
    """Every case takes the steps of one process, in float64."""
    by_name = {
        f"{number}: {layout} {run}": (recipe, layout, run) for number, (recipe, layout, run) in enumerate(cases)
    }
    proofs = prove(by_name, steps=steps, dropout=dropout)
    assert same(proofs, list(by_name)) == {}
    assert {proof.dtype for proof in proofs.values() if isinstance(proof, Proof)} == {"float64"}
