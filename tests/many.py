"""Several proofs in one start of ranks, which costs seconds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import samestep
from samestep.api import _check
from samestep.cluster.start import local
from samestep.cluster.world import join
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.proof import Proof, Reference, hold_against, proof_job, reference
from samestep.tasks.resolve import resolve

Case = tuple[samestep.Recipe, str, dict[str, Any]]  # what is trained, how, and the run's other settings


def verify_all(cases: Sequence[Case], *, steps: int = 3) -> list[Proof]:
    """`samestep.verify` of each, in ranks that are started once; all layouts have one size."""
    jobs = [proof_job(Job(recipe=recipe, run=Run(layout=layout, threads=1, **run))) for recipe, layout, run in cases]
    layouts = [Layout.parse(job.run.layout) for job in jobs]
    (size,) = {layout.size for layout in layouts}
    known: dict[Any, Reference] = {}
    with TemporaryDirectory(prefix="samestep-references-") as folder:
        for job, layout in zip(jobs, layouts, strict=True):
            task = _check(job, layout)
            if str(job.recipe) not in known:
                place = Path(folder) / str(len(known))
                place.mkdir()
                known[str(job.recipe)] = reference(job, task, steps, place)
        references = [known[str(job.recipe)] for job in jobs]
        return local.start(_on_ranks, (jobs, layouts, references, steps), size)


def _on_ranks(
    jobs: Sequence[Job], layouts: Sequence[Layout], references: Sequence[Reference], steps: int
) -> list[Proof]:
    with join(threads=1) as world:
        proofs = []
        for job, layout, known in zip(jobs, layouts, references, strict=True):
            task = resolve(replace(job.recipe))
            proofs.append(hold_against(job, task, world, layout, steps, known if world.rank == 0 else None))
        return proofs
