"""`samestep.train` and `samestep.verify`: check a job, start its ranks, and return their results."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import door, environment, rank_tasks
from samestep.contract.check import find_gradients_passed
from samestep.contract.second_gradients import GradientThroughBlocks, can_lack_gradients, check_second_gradients
from samestep.display.schedule_svg import draw_schedule
from samestep.door.ready import Ready
from samestep.door.rounds import of_round, shrunk
from samestep.engines import registry as engines
from samestep.errors import (
    InterruptedJobError,
    NonFiniteError,
    NotSavedError,
    RankFailedError,
    UserError,
    ended_by_code,
)
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.policy import again, needs_ranks, restart_begins_at_zero
from samestep.fault_tolerance.rank import RankSupervision, Round
from samestep.fault_tolerance.scratch import scratch
from samestep.job import Job, Run
from samestep.launch import fork_server, local
from samestep.launch.affinity import bindings, this_machine, threads_of
from samestep.layout import Layout
from samestep.limits import MOST_RANKS, check_whole
from samestep.plausibility import check_plausible
from samestep.progress import phases
from samestep.rank_imports import rank_imports
from samestep.rank_tasks import StepTiming
from samestep.ranks import DeviceChoice
from samestep.recipe import Recipe
from samestep.run_folder import SCHEDULE_FILE
from samestep.tasks.base import Task
from samestep.training.fit import fit_with_rollbacks
from samestep.training.own_folder import folder_held
from samestep.training.rehearsal import Rehearsal, check_rehearsed, rehearse
from samestep.training.result import TrainResult
from samestep.training.usage import Usage
from samestep.validation import checked
from samestep.verification.bits import BitsRow, compare_bits
from samestep.verification.departure import Looked, after_equal_steps, look
from samestep.verification.itself import check_layout_splits, check_other_side
from samestep.verification.matrix import MatrixRow
from samestep.verification.noise import NoiseMeasurement
from samestep.verification.proof import Proof, Reference, proof_job, reference


def train(recipe: Recipe, layout: str | Layout = "single", **run: Any) -> TrainResult:
    """Train a recipe under a layout, in as many processes as it needs.

    `run` takes the keys of a job file's `run:` section: processes, engine, engine_config, micro_batch, reduction,
    group_by_length, cut_at, device, transport, sparse_rows, share_replicas, threads, bind, workers, profile, check,
    compile, float32_matmul, loss_chunk, bucket_mb, tensor_plan, expert_plan, folder, overwrite, offload_folder,
    checkpoint, log, hooks, rank_lines, max_restarts, hang_limit, grace_period, on_nonfinite, elastic, min_processes,
    inject.
    Raises UserError for a mistake in the job, RankFailedError where a rank fails and restarts are used up,
    NonFiniteError where a loss is NaN or infinite, NotSavedError where checkpoints or results can't be written,
    InterruptedJobError where a signal stops the job.
    """
    job = Job(recipe=recipe, run=_run(layout, run))
    check_plausible(job)
    return train_job(job)


def verify(
    recipe: Recipe,
    layout: str | Layout = "single",
    *,
    steps: int = 5,
    dropout: bool = False,
    reference_device: DeviceChoice = "auto",
    precision: str | None = None,
    **run: Any,
) -> Proof:
    """Take a recipe's first steps under a layout and in one process, in float64, and compare them.

    Both are without dropout, unless `dropout` asks for the recipe's. `reference_device`: "cpu" has the one process
    take its steps there, where an accelerator has no 32 bytes a parameter for it. `precision`: fp32 or bf16, in which
    the layout takes its steps; one process takes them in float64, and what rounding makes of them is measured.
    `run` is as for `train`, and so are the errors. A difference is no error: see the result's `same_step`.
    """
    job = Job(recipe=recipe, run=_run(layout, run))
    return verify_job(job, steps=steps, dropout=dropout, precision=precision, reference_device=reference_device)


def dry_run(recipe: Recipe, layout: str | Layout = "single", **run: Any) -> Sequence[Usage]:
    """Measure what each rank of a job holds and sends: the ranks start, build, take three steps, and write nothing.

    `run` is as for `train`, and so are the errors.
    """
    return dry_run_job(Job(recipe=recipe, run=_run(layout, run)))


@phases.command("train")
def train_job(job: Job) -> TrainResult:
    """Train a job: as one rank where a launcher has started this process, else on ranks that are started here."""
    local.check_not_importing()  # before its folder is found in use, by the job whose rank this is
    round_ = Round.from_agent()
    if round_ is not None:
        job = of_round(job, round_)
    ready = door.check(job, writes=True)
    fork_server.start_early(rank_imports(ready.job), ranks=ready.layout.size)
    if round_ is None or round_.number == 0:
        door.hold_contract(ready)
        _warn_of_batch(ready)
        _warn_of_restarts(ready)
    # After all other checks: `run.overwrite` removes an earlier run, which a job that is refused must not do.
    with folder_held(ready.job, round_) as (job, held):
        outcome = _trained(ready.of(job), held)
    if isinstance(outcome, Exception):  # the same on all ranks, which have ended in good order
        raise outcome
    return outcome


def _warn_of_batch(ready: Ready) -> None:
    """Print a line, in the process that starts the ranks or on rank 0, where no step can have the batch's samples."""
    ranks = environment.ranks()
    batch, samples = ready.job.recipe.batch, len(ready.task.train_set())
    if batch > samples and (ranks is None or ranks.rank == 0):
        print(
            f"samestep: recipe.batch is {batch}, and there are {samples} samples to train on, so each step is of all "
            f"{samples}; use a batch of {samples} or fewer for more steps in an epoch",
            file=sys.stderr,
            flush=True,
        )


def _warn_of_restarts(ready: Ready) -> None:
    """Print a line, in the process that starts the ranks or on rank 0, where a restart takes all steps again."""
    ranks = environment.ranks()
    if ranks is not None and ranks.rank > 0:
        return
    job = ready.job
    total_steps = job.recipe.total_steps(-(-len(ready.task.train_set()) // job.recipe.batch))
    engine = engines.resolve(job.run.engine)
    warning = restart_begins_at_zero(
        job, engine=engine.name, saves=engine.abilities.checkpoints, total_steps=total_steps
    )
    if warning is not None:
        print(f"samestep: {warning}", file=sys.stderr, flush=True)


def _trained(ready: Ready, held: Held | None) -> TrainResult | InterruptedJobError | NonFiniteError | NotSavedError:
    """Train in this process where it is a rank already or one rank is enough; else start ranks, with restarts."""
    if environment.ranks() is not None or not needs_ranks(ready.job, ready.layout):
        return _train_rank(ready, held=held)
    assert ready.job.run.folder is not None

    def call(ready: Ready) -> local.Call:
        return _call(_train_rank, ready, None, held)

    return local.train(ready, ready.job.run.folder, call=call, shrink=shrunk)


def _train_rank(
    ready: Ready, round_: Round | None = None, held: Held | None = None
) -> TrainResult | InterruptedJobError | NonFiniteError | NotSavedError:
    """Train on this rank. `round_`: None for the round that the node's agent has given to this rank, if any.

    `held`: the leases of the run's folders, of which only rank 0 makes use.
    """
    round_ = round_ or Round.from_agent() or Round()
    job, layout = ready.job, ready.layout
    if round_.number > 0:
        job = again(job)
    again_in = f", round {round_.number}" if round_.number else ""
    with (
        phases.running(f"train {layout}{again_in}"),
        RankSupervision(job.run, round_, held) as supervision,
        rank_tasks.joined(job) as world,
    ):
        supervision.joined()
        try:
            result = fit_with_rollbacks(job, ready.task, world, layout, supervision)
        except SystemExit as end:  # it would be taken for the training's own end
            raise RankFailedError(world.rank, ended_by_code(end, "the training")) from None
        except (InterruptedJobError, NonFiniteError) as error:  # all ranks handle it, and leave the group in order
            return error
        except NotSavedError as error:
            if not error.at_end:
                raise  # restarts of the ranks, if there are any, go on from the last checkpoint
            return error
        if world.rank == 0 and (result.folder / SCHEDULE_FILE).exists():
            try:
                draw_schedule(result.folder)
            except OSError as error:  # a picture, which the folder has no room for
                print(f"samestep: {error.filename} can't be drawn: {error.strerror}", file=sys.stderr)
        return result


@phases.command("dry run")
def dry_run_job(job: Job) -> Sequence[Usage]:
    """Measure what each rank of a job holds and sends. In a process that is already a rank, run that rank's part."""
    return _on_ranks(rank_tasks.dry_run_rank, door.check(job))


@phases.command("dry run")
def dry_run_layouts(job: Job, layouts: Sequence[str]) -> dict[str, Sequence[Usage] | str]:
    """Run `dry_run_job` under each layout; refused layouts map to the reason. Ranks start once for each size."""
    usages: dict[str, Sequence[Usage] | str] = {}
    fitting: dict[str, Ready] = {}
    task: Task | None = None
    for text in layouts:
        try:
            ready = door.check(job, door.layout_named(text, job.run.processes), task=task)
        except UserError as error:
            usages[text] = str(error)
        else:
            task = ready.task
            fitting[text] = ready.of(job)
    for size in dict.fromkeys(ready.layout.size for ready in fitting.values()):
        usages |= _usages({text: ready for text, ready in fitting.items() if ready.layout.size == size})
    return usages


@phases.command("time steps")
def time_steps_job(job: Job, *, steps: int = 6) -> Sequence[StepTiming]:
    """Time steps on each rank (seconds), and report what each held: ranks start, and write nothing."""
    return _on_ranks(rank_tasks.time_steps_rank, door.check(job), steps)


@phases.command("dry run")
def rehearse_job(job: Job, world_size: int) -> Sequence[Rehearsal]:
    """Rehearse ranks of a job with `world_size` processes in this process: what each would hold and send.

    None of the ranks is started; of a pipeline some stages are rehearsed. See `samestep.training.rehearsal`. Raises
    UserError for what would fail on the cluster, and for what can't be rehearsed.
    """
    check_whole("--world", world_size, most=MOST_RANKS)
    if environment.ranks() is not None:
        raise UserError("--world is a dry run in one process, and this one is a rank; start it without a launcher")
    job = replace(job, run=replace(job.run, processes=world_size))
    with environment.as_first_of(world_size, world_size):
        ready = door.check(job, here=False, command=check_rehearsed)
    return rehearse(ready.job, ready.task, ready.layout)


@phases.command("verify")
def verify_job(
    job: Job,
    *,
    steps: int = 5,
    dropout: bool = False,
    precision: str | None = None,
    reference_device: DeviceChoice = "auto",
) -> Proof:
    """Compare a layout's first steps with those of one process, which rank 0 or this process takes first.

    The reference runs on `reference_device`: the job's own device, or the CPU. If the steps differ and this process
    starts the ranks, both sides take them once more to find where they depart.
    """
    check_whole("steps", steps)
    differs = partial(check_other_side, text=job.run.layout, precision=precision, reference_device=reference_device)
    ready = door.check(job, command=differs)
    fork_server.start_early(rank_imports(ready.job), ranks=ready.layout.size)
    door.hold_contract(ready, dropout=dropout)
    ready = ready.of(proof_job(ready.job, dropout=dropout, precision=precision))
    job, task, ranks = ready.job, ready.task, environment.ranks()
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        expected = None
        if ranks is None or ranks.rank == 0:
            expected = reference(job, task, steps, Path(folder), device=reference_device)
        proof: Proof = _on_ranks(rank_tasks.verify_rank, ready, steps, expected)
        if ranks is not None:  # of a launcher, which starts none for a search
            return proof
        if proof.wants_noise() and expected is not None:
            proof = proof.held_against_noise(NoiseMeasurement(job, task, steps, expected, reference_device))
        return _with_departure(proof, ready, steps, lambda: look(job, task, steps, Path(folder)))


def _with_departure(proof: Proof, ready: Ready, steps: int, looked: Callable[[], Looked]) -> Proof:
    """Return a failed proof with its first difference, for which both sides take their steps once more.

    `looked`: takes those of one process.
    """
    if not proof.failed_by_steps:
        return proof
    with phases.phase("looking for the step and the module that depart"):
        departure = _on_ranks(rank_tasks.find_rank, ready, steps, looked())
    if departure is None:
        departure = after_equal_steps(proof.max_relative_difference, proof.worst_parameter, proof.tolerance)
    return replace(proof, departure=departure)


@phases.command("verify")
def verify_layouts(
    job: Job,
    layouts: Sequence[str],
    *,
    steps: int = 5,
    dropout: bool = False,
    precision: str | None = None,
    held_out: int | None = None,
    reference_device: DeviceChoice = "auto",
    task: Task | None = None,
) -> list[MatrixRow]:
    """Compare each layout's first steps with those of one process, which takes its steps once for all layouts.

    `held_out` is how many held-out samples are evaluated, None: all; `reference_device` as for `verify_job`; `task`,
    the job's, is built unless given. A layout that this job can't have is a row with the reason. Raises UserError for
    what is wrong with the job.
    """
    if job.run.engine_config is not None:
        raise UserError("--layouts goes without run.engine_config, which is for one layout; use --layout")
    if environment.ranks() is not None:
        raise UserError("--layouts starts its own processes; start it without a launcher")
    alone = door.check(_alone(job), task=task)
    door.hold_contract(alone, dropout=dropout, among=layouts)
    job = proof_job(job, dropout=dropout, precision=precision)
    fitting, reasons = _fitting(job, layouts, alone, precision=precision, reference_device=reference_device)
    rows = {text: MatrixRow(job=job_name(job), layout=text, reason=reason) for text, reason in reasons.items()}
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        expected = reference(job, alone.task, steps, Path(folder), held_out=held_out, device=reference_device)
        for size in dict.fromkeys(ready.layout.size for ready in fitting.values()):
            rows |= _rows(
                {text: ready for text, ready in fitting.items() if ready.layout.size == size}, steps, expected
            )
        noise = NoiseMeasurement(job, alone.task, steps, expected, reference_device)
        looked = cache(partial(look, job, alone.task, steps, Path(folder)))
        for text, row in rows.items():
            if (proof := row.proof) is not None:
                proof = proof.held_against_noise(noise) if proof.wants_noise() else proof
                rows[text] = replace(row, proof=_with_departure(proof, fitting[text], steps, looked))
    return [rows[text] for text in layouts]


def _fitting(
    job: Job, layouts: Sequence[str], alone: Ready, *, precision: str | None, reference_device: DeviceChoice
) -> tuple[dict[str, Ready], dict[str, str]]:
    """Return the job under each layout that it can have, and why it can't have the others.

    `job`: the proof's. `alone`: the same job in one process, whose contract holds.
    """
    fitting: dict[str, Ready] = {}
    reasons: dict[str, str] = {}
    passed: Sequence[GradientThroughBlocks] | None = None
    for text in layouts:
        differs = partial(check_other_side, text=text, precision=precision, reference_device=reference_device)
        try:
            layout = door.layout_named(text, job.run.processes)
            layout = door.check(job, layout, task=alone.task, command=differs).layout
            if can_lack_gradients(layout, job.run.engine):
                passed = find_gradients_passed(_alone(job), alone.task) if passed is None else passed
                check_second_gradients(passed, layout, job.run.engine)
        except UserError as error:
            reasons[text] = str(error)
        else:
            fitting[text] = alone.of(job, layout)
    return fitting, reasons


@phases.command("verify")
def verify_bits(job: Job, layouts: Sequence[str], *, steps: int = 5) -> list[BitsRow]:
    """Compare the bits of a job's ordered steps under each layout with those of one process, and time both kinds.

    A layout that this job can't have is a row with the reason. Raises UserError for what is wrong with the job.
    """
    check_whole("steps", steps)
    if environment.ranks() is not None:
        raise UserError("verify --bits starts its own processes; start it without a launcher")
    job = replace(job, run=replace(job.run, reduction="ordered", checkpoint=None))
    alone = door.check(_alone(job))
    door.hold_contract(alone, among=layouts)
    rows: list[BitsRow] = []
    with TemporaryDirectory(prefix="samestep-bits-") as folder:
        alone_bits = _on_ranks(rank_tasks.bits_rank, alone, steps, Path(folder) / "single", job.run.threads)
        for number, text in enumerate(layouts):
            try:
                layout = door.layout_named(text, job.run.processes)
                ready = door.check(job, layout, task=alone.task, command=partial(_check_splits, text=text))
                place = Path(folder) / str(number)
                bits = _on_ranks(rank_tasks.bits_rank, ready, steps, place, job.run.threads)
            except UserError as error:
                rows.append(BitsRow(layout=text, reason=str(error)))
            except RankFailedError as error:
                rows.append(BitsRow(layout=text, failure=str(error)))
            else:
                rows.append(compare_bits(text, bits, alone_bits))
    return rows


def _check_splits(_: Job, layout: Layout, *, text: str) -> None:
    check_layout_splits(layout, text)


def _rows(layouts: Mapping[str, Ready], steps: int, expected: Reference) -> dict[str, MatrixRow]:
    """Verify layouts of one world size with one start of ranks.

    A layout at which the ranks end is tried with a start of its own, which tells why; those after it with another.
    """
    try:
        with scratch("samestep-verify-") as folder:
            kept = folder / "proofs"
            how = (*_several(layouts), steps, expected, kept)
            try:
                return _as_rows(layouts, _on_ranks(rank_tasks.verify_rank_many, *how))
            except (UserError, RankFailedError):
                if len(layouts) == 1:
                    raise
                # Ranks that a launcher has started go on together, and only one of them has the file.
                done = [] if environment.ranks() is not None else rank_tasks.proofs_in(kept)
        rows = _as_rows(layouts, done)
        left = list(layouts.items())[len(done) :]
        for part in (left[:1], left[1:]):
            rows |= _rows(dict(part), steps, expected) if part else {}
        return rows
    except (UserError, RankFailedError) as error:
        # The job has passed with one process, so a UserError is about the layout.
        ((text, ready),) = layouts.items()
        name, message = job_name(ready.job), str(error)
        if isinstance(error, UserError):
            return {text: MatrixRow(job=name, layout=text, reason=message)}
        return {text: MatrixRow(job=name, layout=text, failure=message)}


def _usages(layouts: Mapping[str, Ready]) -> dict[str, Sequence[Usage] | str]:
    """Dry-run layouts of one world size with one start of ranks; after a failure, with a start for each layout."""
    try:
        usages = _on_ranks(rank_tasks.dry_run_rank_many, *_several(layouts))
    except (UserError, RankFailedError) as error:
        if len(layouts) == 1:
            return dict.fromkeys(layouts, str(error))
        apart: dict[str, Sequence[Usage] | str] = {}
        for text, ready in layouts.items():
            apart |= _usages({text: ready})
        return apart
    return dict(zip(layouts, usages, strict=True))


def _as_rows(layouts: Mapping[str, Ready], proofs: Sequence[rank_tasks.Proved]) -> dict[str, MatrixRow]:
    """The rows of the first of several layouts, for which there is a proof or a reason."""
    rows: dict[str, MatrixRow] = {}
    for (text, ready), (proof, seconds) in zip(layouts.items(), proofs, strict=False):
        name = job_name(ready.job)
        if isinstance(proof, Proof):
            rows[text] = MatrixRow(job=name, layout=text, proof=proof, seconds=seconds)
        else:
            rows[text] = MatrixRow(job=name, layout=text, reason=proof)
    return rows


def _several(layouts: Mapping[str, Ready]) -> tuple[Ready, Sequence[Layout]]:
    """The job under the first of several layouts of one world size, and all of these layouts."""
    all_of_them = list(layouts.values())
    return all_of_them[0], [ready.layout for ready in all_of_them]


def _alone(job: Job) -> Job:
    """Return the job with the layout `single` and without compressed communication."""
    run = replace(job.run, layout="single", processes=None)
    return replace(job, recipe=replace(job.recipe, communication=None), run=run)


def job_name(job: Job) -> str:
    """The job's name in tables: its own, or its task's."""
    return job.name or str(job.recipe.task)


def _run(layout: str | Layout, run: dict[str, Any]) -> Run:
    return checked(Run, {"layout": str(layout), **run}, prefix=("run",))


def _on_ranks(function: Callable[..., Any], ready: Ready, *arguments: Any) -> Any:
    """Call a function on every rank: here if this process is a rank or the only one, else on ranks started here."""
    if environment.ranks() is not None or ready.layout.size == 1:
        return function(ready, *arguments)
    return local.start(*_call(function, ready, *arguments), ready.layout.size)


def _call(function: Callable[..., Any], ready: Ready, *arguments: Any) -> local.Call:
    """Return the call for each rank of a layout on this host: the function, on the rank's cores and threads."""
    run, size = ready.job.run, ready.layout.size
    threads = threads_of(size, run.threads)
    own = bindings(this_machine(), size, run.bind)
    if run.threads is None and environment.asked_threads() is None:
        threads = min(threads, *(binding.threads for binding in own))  # of NUMA nodes one may have fewer cores
    ready = ready.of(replace(ready.job, run=replace(run, threads=threads)))
    return rank_tasks.on_its_cores, (own, phases.work("") or None, function, ready, *arguments)
