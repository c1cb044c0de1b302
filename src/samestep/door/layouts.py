"""A job's layout: read from its text, with the sizes that the text leaves open, and completed by the engine."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from samestep import environment
from samestep.engines import registry as engines
from samestep.engines.checks import check_layout
from samestep.errors import LayoutError
from samestep.job import Job
from samestep.launch.affinity import cores
from samestep.launch.device import accelerators
from samestep.layout import Layout, unsized


def layout_of(job: Job) -> Layout:
    """Return the job's layout; a size that its text leaves open is filled in from the number of processes."""
    ranks = environment.ranks()
    text, processes = job.run.layout, job.run.processes
    if ranks is not None:
        processes = ranks.world_size
    elif processes is None and unsized(text):
        processes = (accelerators() if job.run.device == "auto" else 0) or cores()
    return Layout.parse(text, processes)


def layout_named(text: str, processes: int | None) -> Layout:
    """Return a layout that a list names for a job, beside the job's own; `processes` fills in a size left open."""
    return Layout.parse(text, processes if unsized(text) else None)


def first_of_several(layouts: Sequence[str], processes: int | None) -> Layout | None:
    """The first layout of several processes in a list; one that can't be read is refused where its turn comes."""
    for text in layouts:
        with suppress(LayoutError):
            layout = layout_named(text, processes)
            if layout.size > 1:
                return layout
    return None


def settle(job: Job, layout: Layout | None = None) -> tuple[Job, Layout]:
    """Return the job and its layout (or the given one), completed by the engine's own configuration.

    Raises UserError for a layout or precision that the engine doesn't support, by the job or by the configuration.
    """
    engine, config = engines.resolve(job.run.engine), job.run.engine_config
    layout = layout_of(job) if layout is None else layout
    check_layout(engine, layout, job.recipe.precision, config)
    if job.run.reduction == "ordered" and job.run.threads is None:
        # A product or a sum is cut between threads, so their number must not follow from that of the ranks.
        job = replace(job, run=replace(job.run, threads=1))
    settled, completed = engine.settle(job, layout)
    if (completed, settled.recipe.precision) != (layout, job.recipe.precision):
        check_layout(engine, completed, settled.recipe.precision, config)
    return settled, completed
