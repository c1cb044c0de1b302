"""The command to type after a training: a proof of its step, else a look at its run."""

import argparse
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import environment
from samestep.cli import job_options
from samestep.errors import UserError

if TYPE_CHECKING:
    from samestep.job import Job
    from samestep.jobfile import LoadedJob

_SPLIT = "dp2"  # the layout that a job of one process is proved under
_OF_TRAINING = ("checkpoint-every", "max-restarts", "folder")  # flags that don't change a step


def after_training(options: argparse.Namespace, loaded: "LoadedJob", folder: Path) -> str:
    """`samestep verify` of the same job where a proof of it can start here, else `samestep doctor` of its folder."""
    split = _layout_to_prove(loaded.job)
    others = environment.ranks() is not None  # under a launcher, whose ranks the next command doesn't have
    # Hyperparameters of a SageMaker job stand in no option that could be typed again.
    typed = all(not source.startswith("hyperparameter ") for source in loaded.sources.values())
    if split is None or others or not typed:
        return shlex.join(["samestep", "doctor", str(folder)])
    words = ["samestep", "verify", str(options.job)]
    for flag in job_options.FLAGS:
        value = getattr(options, flag.replace("-", "_"))
        if value is not None and flag not in (*_OF_TRAINING, "layout"):
            words += [f"--{flag}", value]
    words += [word for text in options.set for word in ("--set", text)]
    words += ["--no-check"] if options.no_check else []
    return shlex.join([*words, "--layout", split])


def _layout_to_prove(job: "Job") -> str | None:
    """The job's layout, or for one process another that splits it; None where nothing can be proved."""
    from samestep.door.layouts import layout_of
    from samestep.verification.itself import check_layout_splits, check_other_side
    from samestep.verification.proof import proof_job

    if job.recipe.communication is not None:  # takes another step than one process, as it declares
        return None
    text = job.run.layout
    try:
        proof_job(job)
    except UserError:
        return None
    for layout, check in (
        (text, lambda: check_layout_splits(layout_of(job), text)),
        (_SPLIT, lambda: _check_split(job)),
        # One process that differs from the plain one in something else, such as its engine.
        (text, lambda: check_other_side(job, layout_of(job), text=text, precision=None, reference_device="auto")),
    ):
        with suppress(UserError):
            check()
            return layout
    return None


def _check_split(job: "Job") -> None:
    """Raise UserError where a job of one process can't be split.

    These don't build the task, which takes time: what a model of one process has passed, it passes in replicas.
    """
    from samestep.door.layouts import layout_of
    from samestep.engines import checks
    from samestep.engines.registry import resolve
    from samestep.launch.device import device_of

    job = replace(job, run=replace(job.run, layout=_SPLIT))
    engine, layout = resolve(job.run.engine), layout_of(job)
    checks.check_layout(engine, layout, job.recipe.precision, job.run.engine_config)
    checks.check_job(job, engine, layout, device_of(0, job.run.device).type)
    layout.check_batch(job.recipe.batch, job.run.micro_batch)
