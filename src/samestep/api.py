"""`samestep.train` and `samestep.verify`: check a job, start its ranks, and return their results."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import environment, rank_tasks
from samestep.contract.check import check_contract, find_gradients_passed
from samestep.contract.second_gradients import GradientThroughBlocks, can_lack_gradients, check_second_gradients
from samestep.display.schedule_svg import draw_schedule
from samestep.engines import registry as engines
from samestep.engines.checks import check_layout
from samestep.errors import (
    InterruptedJobError,
    NonFiniteError,
    NotSavedError,
    RankFailedError,
    UserError,
    ended_by_code,
)
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.policy import again, needs_ranks, restart_begins_at_zero, shrink
from samestep.fault_tolerance.rank import RankSupervision, Round
from samestep.job import Job, Run
from samestep.launch import fork_server, local
from samestep.launch.affinity import bindings, cores, this_machine, threads_of
from samestep.launch.device import accelerators
from samestep.layout import Layout, unsized
from samestep.limits import MOST_RANKS, check_whole
from samestep.plausibility import check_plausible
from samestep.preflight import preflight
from samestep.progress import phases
from samestep.rank_imports import rank_imports
from samestep.rank_tasks import StepTiming
from samestep.ranks import DeviceChoice
from samestep.recipe import Recipe
from samestep.run_folder import SCHEDULE_FILE
from samestep.tasks.base import Task
from samestep.tasks.registry import knowing
from samestep.tasks.registry import resolve as resolve_task
from samestep.training.checkpointing import check_place
from samestep.training.fit import fit_with_rollbacks
from samestep.training.own_folder import check_folder_free, folder_held
from samestep.training.rehearsal import Rehearsal, check_rehearsed, rehearse
from samestep.training.result import TrainResult, check_folder
from samestep.training.usage import Usage
from samestep.validation import checked
from samestep.verification.bits import BitsRow, compare_bits
from samestep.verification.departure import after_equal_steps, look
from samestep.verification.itself import check_layout_splits, check_other_side
from samestep.verification.matrix import MatrixRow
from samestep.verification.noise import NoiseMeasurement
from samestep.verification.proof import Proof, Reference, proof_job, reference


def train(recipe: Recipe, layout: str | Layout = "single", **run: Any) -> TrainResult:
    """Train a recipe under a layout, in as many processes as it needs.

    `run` takes the keys of a job file's `run:` section: processes, engine, engine_config, micro_batch, reduction,
    group_by_length, cut_at, device, transport, sparse_rows, share_replicas, threads, bind, workers, profile, check,
    compile, float32_matmul, loss_chunk, bucket_mb, tensor_plan, expert_plan, folder, overwrite, offload_folder,
    checkpoint, tensorboard, rank_lines, max_restarts, hang_limit, grace_period, on_nonfinite, elastic, min_processes,
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
        job = _of_round(job, round_)
    job, layout = _settled(job)
    check_folder(job.run.folder)
    if job.run.profile is not None:
        check_folder(job.run.profile.folder, "run.profile.folder")
    check_place(job.run.checkpoint, job.run.folder)
    first = round_ is None or round_.number == 0
    if job.run.folder is not None and environment.ranks() is None:  # a rank may find it held for its own job
        check_folder_free(job, job.run.folder)
    task = preflight(job, layout)
    fork_server.start_early(job, rank_imports(job))
    if first:
        _check_contract(job, layout, task)
        _warn_of_batch(job, task)
        _warn_of_restarts(job, task)
    # After all other checks: `run.overwrite` removes an earlier run, which a job that is refused must not do.
    with folder_held(job, round_) as (job, held):
        outcome = _trained(job, layout, task, held)
    if isinstance(outcome, Exception):  # the same on all ranks, which have ended in good order
        raise outcome
    return outcome


def _warn_of_batch(job: Job, task: Task) -> None:
    """Print a line, in the process that starts the ranks or on rank 0, where no step can have the batch's samples."""
    ranks = environment.ranks()
    batch, samples = job.recipe.batch, len(task.train_set())
    if batch > samples and (ranks is None or ranks.rank == 0):
        print(
            f"samestep: recipe.batch is {batch}, and there are {samples} samples to train on, so each step is of all "
            f"{samples}; use a batch of {samples} or fewer for more steps in an epoch",
            file=sys.stderr,
            flush=True,
        )


def _warn_of_restarts(job: Job, task: Task) -> None:
    """Print a line, in the process that starts the ranks or on rank 0, where a restart takes all steps again."""
    ranks = environment.ranks()
    if ranks is not None and ranks.rank > 0:
        return
    total_steps = job.recipe.total_steps(-(-len(task.train_set()) // job.recipe.batch))
    engine = engines.resolve(job.run.engine)
    warning = restart_begins_at_zero(
        job, engine=engine.name, saves=engine.abilities.checkpoints, total_steps=total_steps
    )
    if warning is not None:
        print(f"samestep: {warning}", file=sys.stderr, flush=True)


def _of_round(job: Job, round_: Round) -> Job:
    """Adapt a job to the round of its ranks: resume after a restart, and take a layout that fits the world size."""
    job = again(job) if round_.number > 0 else job
    if round_.run_folder is not None:
        job = replace(job, run=replace(job.run, folder=round_.run_folder))
    ranks = environment.ranks()
    if not job.run.elastic or ranks is None or unsized(job.run.layout):
        return job
    layout = Layout.parse(job.run.layout, None)
    for candidate in shrink(layout, job.run.min_processes):
        if candidate.size == ranks.world_size:
            inject = tuple(fault for fault in job.run.inject if fault.rank < ranks.world_size)
            of_this = {"layout": str(candidate), "elastic": False, "min_processes": 1, "inject": inject}
            return replace(job, run=replace(job.run, processes=None, **of_this))
    return job


def _trained(
    job: Job, layout: Layout, task: Task, held: Held | None
) -> TrainResult | InterruptedJobError | NonFiniteError | NotSavedError:
    """Train in this process where it is a rank already or one rank is enough; else start ranks, with restarts."""
    if environment.ranks() is not None or not needs_ranks(job, layout):
        with knowing(task.tried_facts()):
            return _train_rank(job, layout, held=held)
    assert job.run.folder is not None

    def call(job: Job, layout: Layout) -> local.Call:
        return _call(_train_rank, job, layout, task, None, held)

    return local.train(job, layout, job.run.folder, call=call, shrink=partial(_shrunk, task=task))


def _train_rank(
    job: Job, layout: Layout, round_: Round | None = None, held: Held | None = None
) -> TrainResult | InterruptedJobError | NonFiniteError | NotSavedError:
    """Train on this rank. `round_`: None for the round that the node's agent has given to this rank, if any.

    `held`: the leases of the run's folders, of which only rank 0 makes use.
    """
    round_ = round_ or Round.from_agent() or Round()
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
            result = fit_with_rollbacks(job, resolve_task(job.recipe), world, layout, supervision)
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


def _shrunk(job: Job, layout: Layout, task: Task) -> tuple[Job, Layout] | None:
    """Return the job with the largest smaller layout that passes the preflight checks; None if there is none."""
    for candidate in shrink(layout, job.run.min_processes):
        found = replace(job, run=replace(job.run, layout=str(candidate), processes=None, inject=()))
        try:
            found, settled = _settled(found)
            preflight(found, settled, task)
        except UserError:
            continue
        return replace(found, run=replace(found.run, inject=job.run.inject)), settled
    return None


@phases.command("dry run")
def dry_run_job(job: Job) -> Sequence[Usage]:
    """Measure what each rank of a job holds and sends. In a process that is already a rank, run that rank's part."""
    job, layout = _settled(job)
    task = preflight(job, layout)
    return _on_ranks(rank_tasks.dry_run_rank, job, layout, task)


@phases.command("dry run")
def dry_run_layouts(job: Job, layouts: Sequence[str]) -> dict[str, Sequence[Usage] | str]:
    """Run `dry_run_job` under each layout; refused layouts map to the reason. Ranks start once for each size."""
    found: dict[str, Sequence[Usage] | str] = {}
    fitting: dict[str, Layout] = {}
    task: Task | None = None
    for text in layouts:
        try:
            settled, layout = _settled(job, Layout.parse(text, job.run.processes if unsized(text) else None))
            task = preflight(settled, layout, task)
        except UserError as error:
            found[text] = str(error)
        else:
            fitting[text] = layout
    for size in dict.fromkeys(layout.size for layout in fitting.values()):
        assert task is not None  # of the layouts that fit
        found |= _usages(job, {text: each for text, each in fitting.items() if each.size == size}, task)
    return found


@phases.command("time steps")
def time_steps_job(job: Job, *, steps: int = 6) -> Sequence[StepTiming]:
    """Time steps on each rank (seconds), and report what each held: ranks start, and write nothing."""
    job, layout = _settled(job)
    task = preflight(job, layout)
    return _on_ranks(rank_tasks.time_steps_rank, job, layout, task, steps)


@phases.command("dry run")
def rehearse_job(job: Job, world_size: int) -> Sequence[Rehearsal]:
    """Rehearse ranks of a job with `world_size` processes in this process: what each would hold and send.

    None of the ranks is started; of a pipeline some stages are rehearsed. See `samestep.training.rehearsal`. Raises
    UserError for what would fail on the cluster, and for what can't be rehearsed.
    """
    check_whole("--world", world_size, most=MOST_RANKS)
    if environment.ranks() is not None:
        raise UserError("--world is a dry run in one process, and this one is a rank; start it without a launcher")
    layout = Layout.parse(job.run.layout, world_size)
    job = replace(job, run=replace(job.run, processes=world_size))
    with environment.as_first_of(world_size, world_size):
        job, layout = _settled(job, layout)
        check_rehearsed(job, layout)
        task = preflight(job, layout, here=False)
    return rehearse(job, task, layout)


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
    text = job.run.layout
    job, layout = _settled(job)
    check_other_side(job, layout, text=text, precision=precision, reference_device=reference_device)
    task = preflight(job, layout)
    fork_server.start_early(job, rank_imports(job))
    _check_contract(job, layout, task, dropout=dropout)
    job = proof_job(job, dropout=dropout, precision=precision)
    ranks = environment.ranks()
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        known = None
        if ranks is None or ranks.rank == 0:
            known = reference(job, task, steps, Path(folder), device=reference_device)
        proof: Proof = _on_ranks(rank_tasks.verify_rank, job, layout, task, steps, known)
        if ranks is not None or proof.same_step or proof.communication is not None or proof.nonfinite:
            return proof
        if proof.wants_noise() and known is not None:
            proof = proof.held_against_noise(NoiseMeasurement(job, task, steps, known, reference_device))
            if proof.same_step or proof.undecided:
                return proof
        with phases.phase("looking for the step and the module that depart"):
            looked = look(job, task, steps, Path(folder))
        departure = _on_ranks(rank_tasks.find_rank, job, layout, task, steps, looked)
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
    task = preflight(_alone(job), Layout(), task)
    _check_contract(_alone(job), Layout(), task, dropout=dropout)
    passed: Sequence[GradientThroughBlocks] | None = None
    job = proof_job(job, dropout=dropout, precision=precision)
    fitting: dict[str, Layout] = {}
    rows: dict[str, MatrixRow] = {}
    for text in layouts:
        try:
            layout = Layout.parse(text, job.run.processes if unsized(text) else None)
            settled, layout = _settled(job, layout)
            check_other_side(settled, layout, text=text, precision=precision, reference_device=reference_device)
            preflight(settled, layout, task)
            if can_lack_gradients(layout, job.run.engine):
                passed = find_gradients_passed(_alone(job), task) if passed is None else passed
                check_second_gradients(passed, layout, job.run.engine)
        except UserError as error:
            rows[text] = MatrixRow(job=job_name(job), layout=text, reason=str(error))
        else:
            fitting[text] = layout
    with TemporaryDirectory(prefix="samestep-reference-") as folder:
        known = reference(job, task, steps, Path(folder), held_out=held_out, device=reference_device)
        for size in dict.fromkeys(layout.size for layout in fitting.values()):
            of_size = {text: each for text, each in fitting.items() if each.size == size}
            rows |= _rows(job, of_size, task, steps, known)
        noise = NoiseMeasurement(job, task, steps, known, reference_device)
        for text, row in rows.items():
            if row.proof is not None and row.proof.wants_noise():
                rows[text] = replace(row, proof=row.proof.held_against_noise(noise))
    return [rows[text] for text in layouts]


@phases.command("verify")
def verify_bits(job: Job, layouts: Sequence[str], *, steps: int = 5) -> list[BitsRow]:
    """Compare the bits of a job's ordered steps under each layout with those of one process, and time both kinds.

    A layout that this job can't have is a row with the reason. Raises UserError for what is wrong with the job.
    """
    check_whole("steps", steps)
    if environment.ranks() is not None:
        raise UserError("verify --bits starts its own processes; start it without a launcher")
    job = replace(job, run=replace(job.run, reduction="ordered", checkpoint=None))
    alone, single = _settled(_alone(job))
    task = preflight(alone, single)
    _check_contract(alone, single, task)
    rows: list[BitsRow] = []
    with TemporaryDirectory(prefix="samestep-bits-") as folder:
        known = _on_ranks(rank_tasks.bits_rank, alone, single, task, steps, Path(folder) / "single", job.run.threads)
        for number, text in enumerate(layouts):
            try:
                settled, layout = _settled(job, Layout.parse(text, job.run.processes if unsized(text) else None))
                check_layout_splits(layout, text)
                preflight(settled, layout, task)
                place = Path(folder) / str(number)
                bits = _on_ranks(rank_tasks.bits_rank, settled, layout, task, steps, place, job.run.threads)
            except UserError as error:
                rows.append(BitsRow(layout=text, reason=str(error)))
            except RankFailedError as error:
                rows.append(BitsRow(layout=text, failure=str(error)))
            else:
                rows.append(compare_bits(text, bits, known))
    return rows


def _rows(job: Job, layouts: Mapping[str, Layout], task: Task, steps: int, known: Reference) -> dict[str, MatrixRow]:
    """Verify layouts of one world size with one start of ranks; after a failure, with a start for each layout."""
    try:
        return _in_one_start(job, layouts, task, steps, known)
    except (UserError, RankFailedError) as error:
        if len(layouts) > 1:
            rows: dict[str, MatrixRow] = {}
            for text, layout in layouts.items():
                rows |= _rows(job, {text: layout}, task, steps, known)
            return rows
        # The job has passed with one process, so a UserError is about the layout.
        (text,), message = layouts, str(error)
        if isinstance(error, UserError):
            row = MatrixRow(job=job_name(job), layout=text, reason=message)
        else:
            row = MatrixRow(job=job_name(job), layout=text, failure=message)
        return {text: row}


def _usages(job: Job, layouts: Mapping[str, Layout], task: Task) -> dict[str, Sequence[Usage] | str]:
    """Dry-run layouts of one world size with one start of ranks; after a failure, with a start for each layout."""
    try:
        of_this_size = next(iter(layouts.values()))
        usages = _on_ranks(rank_tasks.dry_run_rank_many, job, of_this_size, task, list(layouts.values()))
    except (UserError, RankFailedError) as error:
        if len(layouts) == 1:
            return dict.fromkeys(layouts, str(error))
        apart: dict[str, Sequence[Usage] | str] = {}
        for text, layout in layouts.items():
            apart |= _usages(job, {text: layout}, task)
        return apart
    return dict(zip(layouts, usages, strict=True))


def _in_one_start(
    job: Job, layouts: Mapping[str, Layout], task: Task, steps: int, known: Reference
) -> dict[str, MatrixRow]:
    """Verify several layouts of one world size with one start of ranks, which takes longer than the steps."""
    size = next(iter(layouts.values()))
    proofs = _on_ranks(rank_tasks.verify_rank_many, job, size, task, list(layouts.values()), steps, known)
    rows: dict[str, MatrixRow] = {}
    for text, (found, seconds) in zip(layouts, proofs, strict=True):
        if isinstance(found, Proof):
            rows[text] = MatrixRow(job=job_name(job), layout=text, proof=found, seconds=seconds)
        else:
            rows[text] = MatrixRow(job=job_name(job), layout=text, reason=found)
    return rows


def _alone(job: Job) -> Job:
    """Return the job with the layout `single` and without compressed communication."""
    run = replace(job.run, layout="single", processes=None)
    return replace(job, recipe=replace(job.recipe, communication=None), run=run)


def job_name(job: Job) -> str:
    """The job's name in tables: its own, or its task's."""
    return job.name or str(job.recipe.task)


def _run(layout: str | Layout, run: dict[str, Any]) -> Run:
    return checked(Run, {"layout": str(layout), **run}, prefix=("run",))


def layout_of(job: Job) -> Layout:
    """Return the job's layout; a size that its text leaves open is filled in from the number of processes."""
    ranks = environment.ranks()
    text, processes = job.run.layout, job.run.processes
    if ranks is not None:
        processes = ranks.world_size
    elif processes is None and unsized(text):
        processes = (accelerators() if job.run.device == "auto" else 0) or cores()
    return Layout.parse(text, processes)


def check_job(job: Job, task: Task | None = None, *, here: bool = True) -> Task:
    """Check a job before any process starts, and return its task, which is built unless given.

    With `here` false all ranks are on other hosts, whose accelerators are not known.
    """
    return preflight(*_settled(job), task, here=here)


def _settled(job: Job, layout: Layout | None = None) -> tuple[Job, Layout]:
    """Return the job and its layout (or the given one), completed by the engine's own configuration."""
    engine = engines.resolve(job.run.engine)
    layout = layout_of(job) if layout is None else layout
    check_layout(engine, layout, job.recipe.precision, job.run.engine_config)
    if job.run.reduction == "ordered" and job.run.threads is None:
        # A product or a sum is cut between threads, so their number must not follow from that of the ranks.
        job = replace(job, run=replace(job.run, threads=1))
    return engine.settle(job, layout)


def _check_contract(job: Job, layout: Layout, task: Task, *, dropout: bool = True) -> None:
    """Check the task's contract once for all ranks: in the process that starts them, or on rank 0."""
    ranks = environment.ranks()
    if job.run.check and (ranks is None or ranks.rank == 0):
        recipe = replace(job.recipe, dropout=job.recipe.dropout and dropout)
        # The layout's text may leave a size to the number of ranks, which the contract does not know.
        with phases.phase("checking the task's contract"):
            check_contract(replace(job, recipe=recipe, run=replace(job.run, layout=str(layout))), task)


def _on_ranks(function: Callable[..., Any], job: Job, layout: Layout, task: Task, *arguments: Any) -> Any:
    """Call a function on every rank: here if this process is a rank or the only one, else on ranks started here.

    `task` is the job's, whose facts the ranks get.
    """
    if environment.ranks() is not None or layout.size == 1:
        with knowing(task.tried_facts()):
            return function(job, layout, *arguments)
    return local.start(*_call(function, job, layout, task, *arguments), layout.size)


def _call(function: Callable[..., Any], job: Job, layout: Layout, task: Task, *arguments: Any) -> local.Call:
    """Return the call for each rank of a layout on this host: the function, on the rank's cores and threads."""
    threads = threads_of(layout.size, job.run.threads)
    own = bindings(this_machine(), layout.size, job.run.bind)
    if job.run.threads is None and environment.asked_threads() is None:
        threads = min(threads, *(each.threads for each in own))  # of NUMA nodes one may have fewer cores
    job = replace(job, run=replace(job.run, threads=threads))
    work = phases.work("") or None
    return rank_tasks.on_its_cores, (own, work, task.tried_facts(), function, job, layout, *arguments)
