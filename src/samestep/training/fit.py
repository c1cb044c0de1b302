"""A whole training on one rank: build, step, evaluate, record.

`Training` builds the pieces once: task, loaders, model, session, optimizer. `build_model` seeds PyTorch before the
task's `model()`, so every rank draws the same initial weights, also those that it won't hold
(`parallel.deferred_init`).
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.values import values_of
from samestep.data.loader import StepBatch
from samestep.data.order import SampleOrder
from samestep.data.types import First
from samestep.engines.base import OptimizerOf, Skipping, StepReport, TurnTaking
from samestep.engines.registry import resolve as resolve_engine
from samestep.errors import InterruptedJobError, NonFiniteError, NotSavedError
from samestep.fault_tolerance.nonfinite import NonFinite, left_out
from samestep.fault_tolerance.policy import again
from samestep.fault_tolerance.rank import RankSupervision
from samestep.hooks import Began, Ended
from samestep.job import Job
from samestep.jobfile import plain
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.deferred_init import InitialModel, build_recorded
from samestep.parallel.parallel_model import Findings, ModelDetails
from samestep.profiling.breakdown import Profile
from samestep.profiling.profiler import FOLDER as PROFILE_FOLDER
from samestep.profiling.profiler import StepProfiler
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.recipe import Recipe
from samestep.run_folder import RunPlace
from samestep.tasks.base import Task
from samestep.tasks.losses import task_loss
from samestep.tasks.turns import StepTurns, check_parameters, turns_of
from samestep.training import result as results
from samestep.training import usage as usages
from samestep.training.adapters import put_adapters
from samestep.training.checkpointing import Checkpoints
from samestep.training.early_stop import Stopped
from samestep.training.evaluation import switch_off
from samestep.training.example import example_of
from samestep.training.hooked import CalledHooks
from samestep.training.in_turn import in_turn
from samestep.training.learned_from import learns_from
from samestep.training.loop import StepLog, take_all_steps
from samestep.training.metrics_log import Records, Tally
from samestep.training.model_checks import check_memory, check_model, check_same_task, materialize
from samestep.training.optimizer import OptimizerPlan, optimizer_of_turns
from samestep.training.result import TrainResult
from samestep.training.schedule import make_schedule
from samestep.training.session import Session
from samestep.training.usage import Usage, speeds


class Training:
    """A recipe's task, model and batches in a session. `verify` takes a few steps of it, `train` all."""

    def __init__(
        self,
        job: Job,
        task: Task,
        world: World,
        layout: Layout,
        *,
        held_out: int | None = None,
        shuffled_within: int | None = None,
        findings: Findings | None = None,
    ) -> None:
        """`held_out`: number of held-out samples to evaluate, None for all.

        `findings`: about the model, which other trainings of the same job in this process share.
        `shuffled_within`: a seed that shuffles the samples within each global batch.
        """
        recipe = job.recipe
        self.recipe = recipe
        self.task = task
        self._held_out = held_out
        self.usage: Usage | None = None
        self.evaluation_seconds = 0.0
        self.profiler: StepProfiler | None = None
        self._fused = job.run.reduction == "fast"
        engine = resolve_engine(job.run.engine)
        self.session = Session(world=world, layout=layout, engine=engine, options=Options.of(job))
        self.turns = turns_of(task)
        with phases.phase("reading the data", once="data"):
            self.samples = task.train_set()
        self._lengths = task.sample_lengths() if job.run.group_by_length else None
        if shuffled_within is not None:  # random lengths, by which batches are ordered
            generator = torch.Generator().manual_seed(shuffled_within)
            self._lengths = torch.randperm(len(self.samples), generator=generator).tolist()
        self.steps_per_epoch = -(-len(self.samples) // recipe.batch)
        self.total_steps = recipe.total_steps(self.steps_per_epoch)
        self.first_step = 0  # above 0 after resuming from a checkpoint
        # First, since a task may inspect its model here, which has no values while it is recorded.
        followed = layout.cuts_model or layout.zero > 0 or layout.expert > 1
        example = example_of(task, self.samples, self.turns, telling=followed)
        with phases.phase("building the model", once="model"):
            built = self._build(recorded=self.session.engine.can_fill(layout))
        check_same_task(self.samples, built.model)
        self.kinds = {type(module) for module in built.model.modules()}
        self.values = values_of(task, built.model, recipe.args.values())  # before a layout changes some
        check_parameters(self.turns, built.model)
        if not recipe.dropout:
            switch_off(built.model)
        self.complex = [name for name, tensor in built.model.state_dict().items() if tensor.is_complex()]
        details = ModelDetails(
            example=example, initial=built.values, batch_buffers=task.batch_buffers(), findings=findings
        )
        with phases.phase(f"applying layout {layout}", once=f"layout {layout}"):
            self._prepare(built, details)

    def _build(self, *, recorded: bool) -> InitialModel:
        with in_turn() if self.session.world.world_size > 1 else nullcontext():
            return build_model(self.task, self.recipe, recorded=recorded)

    def _prepare(self, built: InitialModel, details: ModelDetails) -> None:
        """Spread the model over the ranks."""
        self.session.prepare_with(
            built.model,
            optimizer_of=self._optimizer_of(built.model),
            schedule_of=partial(make_schedule, self.recipe.schedule, self.total_steps),
            details=details,
            recipe=self.recipe,
        )

    def _optimizer_of(self, model: nn.Module) -> OptimizerOf:
        """The function that makes the optimizer from this rank's parameters once the model is spread."""
        if not self.turns:
            return OptimizerPlan(self.recipe, model, fused=self._fused)
        return partial(optimizer_of_turns, self.recipe, model, self.turns)

    def late_step(self) -> int:
        """The last step with a full batch, if there is one: a step after warm-up."""
        last = self.total_steps - 1
        short = (last + 1) % self.steps_per_epoch == 0 and len(self.samples) % self.recipe.batch > 0
        return last - 1 if short and last else last

    def steps(
        self,
        stop: int | None = None,
        *,
        measured: int | None = None,
        supervision: RankSupervision | None = None,
        left_out: Collection[int] = (),
    ) -> Iterator[tuple[StepBatch, StepReport]]:
        """Take a step at each iteration, up to `stop` or the end; step `measured` sets `usage`.

        Steps in `left_out` only advance the schedule.
        """
        batches = self.session.batches(
            self.samples,
            batch=self.recipe.batch,
            collate=self.task.collate,
            start=self.first_step,
            steps=min(stop or self.total_steps, self.total_steps),
            lengths=self._lengths,
        )
        for batch in batches if self.profiler is None else self.profiler.batches(batches):
            if batch.step in left_out:
                yield batch, self._passed_over()
                continue
            take = self._take(batch, supervision)
            with nullcontext() if supervision is None else supervision.step(batch.step):
                if batch.step == measured:
                    report, self.usage = usages.measured(self.session.trainer, take)
                else:
                    report = take()
            yield batch, report
        self.session.trainer.settle()

    def _take(self, batch: StepBatch, supervision: RankSupervision | None) -> Callable[[], StepReport]:
        """The function that takes the step of a batch."""
        nonfinite = supervision is not None and supervision.spoils(batch.step)
        trainer = self.session.trainer
        if not self.turns:
            loss = replace(task_loss(self.task.loss, self.task.loss_weights), nonfinite=nonfinite)
            return partial(trainer.step, batch, loss)
        assert isinstance(trainer, TurnTaking)  # by the engine's abilities, which were checked
        return partial(trainer.step_in_turns, batch, StepTurns(self.turns, nonfinite=nonfinite))

    def _passed_over(self) -> StepReport:
        """Advance the schedule past a skipped step; its report has NaN for loss and gradient norm."""
        trainer = self.session.trainer
        assert isinstance(trainer, Skipping)  # by the engine's abilities, which were checked
        nothing = torch.tensor(float("nan"), dtype=torch.float64)
        return StepReport(loss=nothing, grad_norm=nothing, lr=trainer.pass_over())

    def samples_of(self, step: int) -> Sequence[int]:
        """The indices in the data set of the samples of a step's global batch."""
        order = SampleOrder(size=len(self.samples), batch=self.recipe.batch, seed=self.recipe.seed)
        return order.global_batch(step).tolist()

    @property
    def measured_step(self) -> int:
        """The step whose memory and communication are measured."""
        return measured_step(self.total_steps, self.first_step)

    def evaluate(self, bar: Bar | None = None) -> dict[str, Any]:
        """Evaluate the task's metrics on its held-out samples; empty if it has none."""
        samples = self.task.eval_set()
        if samples is None or len(samples) == 0:
            return {}
        if self._held_out is not None:
            samples = First(samples, self._held_out)
        began = time.perf_counter()
        metrics = self.session.evaluate(
            samples,
            collate=self.task.collate,
            metrics=self.task.metrics(),
            scores=self.task.scores,
            batch=self.recipe.evaluation.batch,
            class_names=self.task.class_names(),
            bar=bar,
        )
        self.evaluation_seconds += time.perf_counter() - began
        return metrics


def build_model(task: Task, recipe: Recipe, *, recorded: bool = False) -> InitialModel:
    """Build the task's model, with the recipe's adapter, under the recipe's seed.

    The initial weights are the same in every process and for every layout.

    With `recorded`, parameters are filled with them later, where the model's construction allows it.
    """

    def make() -> torch.nn.Module:
        """One seed for all ranks: the construction draws the same numbers everywhere."""
        torch.manual_seed(recipe.seed)
        model = task.model()
        check_model(model, "model()")
        if recipe.adapter is not None:
            put_adapters(model, recipe.adapter)
        # As every loop does before its first step: a model's own `train` may keep parts in evaluation mode.
        return model.train()

    with torch.random.fork_rng(devices=[]):
        built = build_recorded(make) if recorded else InitialModel(model=make(), values=None)
        if built.values is None:
            check_memory(built.model, "model()")
            materialize(built.model, lambda: example_of(task, task.train_set(), turns_of(task)), "model()")
        return built


def fit(
    job: Job, task: Task, world: World, layout: Layout, supervision: RankSupervision, *, from_start: bool = True
) -> TrainResult:
    """Train to the end on this rank; every rank returns the same result. `from_start`: the run is not a restart.

    Raises, on every rank, InterruptedJobError after the step at which a signal stops the training, and
    NonFiniteError for a loss or a gradient norm that isn't finite, where the job doesn't skip the step.
    """
    training = Training(job, task, world, layout)
    session = training.session
    results.check_weights(training.complex, job.recipe.precision)
    folder = results.folder_of(job)
    supervision.runs(layout, folder)
    timeline = session.trainer.timeline
    if timeline is not None:
        timeline.step = training.late_step()
    _prepare(training, job, supervision)
    metrics: dict[str, Any] = {}
    ended: Exception | None = None
    stopped: Stopped | None = None
    lost: str | None = None
    learns = learns_from(task, job.recipe, training.samples, training.kinds, training.values)
    with Checkpoints(job, session, folder, learns, supervision.memory, supervision.held) as checkpoints:
        training.first_step = checkpoints.resume(training.steps_per_epoch)
        bar = Bar(
            f"train {layout}",
            training.total_steps,
            first=training.first_step,
            shown=session.is_main,
            unit="step",
        )
        with (
            Records(
                folder if session.is_main else None,
                first_step=training.first_step,
                log=job.run.log,
                name=RunPlace.of(job).name,
                config=plain(job, written=True),
                held=supervision.held,
            ) as records,
            bar,
        ):
            guard = _nonfinite_guard(training, job, folder, from_start=from_start)
            profiler = _profiler(training, job)
            losses, skipped_before = results.agreed((records.losses, records.skipped))
            hooks = CalledHooks(job.run.hooks, session.world.world_size)
            log = StepLog(records, bar, Tally(len(training.samples)), guard, losses=losses, hooks=hooks or None)
            hooks.began(_began(training, folder))
            log.skipped = lambda: skipped_before + checkpoints.skipped
            phases.say(_first_step(job, training))
            try:
                with nullcontext() if profiler is None else profiler:
                    stopped = take_all_steps(training, log, checkpoints, supervision)
            except (InterruptedJobError, NonFiniteError) as error:  # the same on all ranks: they leave in good order
                ended = error
            if ended is None:
                checkpoints.begin()
            supervision.ends()
            done = training.total_steps if stopped is None else stopped.step
            if stopped is not None:
                session.warn(stopped.reason)
                metrics = dict(stopped.metrics)
            if ended is None and not metrics and job.recipe.evaluation.at_end:
                with phases.phase("evaluating the trained model"):
                    metrics = training.evaluate(bar)
                records.evaluation(done, metrics)
            if ended is None:
                reason = None if stopped is None else stopped.reason
                hooks.ended(Ended(step=done, metrics=metrics, stopped_early=reason))
        if ended is None and job.run.checkpoint is not None:
            with phases.phase("saving the last checkpoint"):
                lost = checkpoints.finish(done, metrics)
    if ended is not None:
        raise ended
    try:
        with phases.phase("writing the final weights and the report"):
            result = _finish(job, training, log, metrics, folder, checkpoints, supervision, stopped)
    except NotSavedError as error:
        raise NotSavedError(f"{lost}; {error}", at_end=True) if lost is not None else error from None
    if lost is not None:
        raise NotSavedError(f"{lost}; the weights are in {result.model_file}", at_end=True)
    return result


def _began(training: Training, folder: Path) -> Began:
    """What hooks are told before the first step."""
    world = training.session.world
    return Began(
        folder=folder,
        layout=str(training.session.layout),
        rank=world.rank,
        world_size=world.world_size,
        first_step=training.first_step,
        total_steps=training.total_steps,
    )


def _first_step(job: Job, training: Training) -> str:
    """The line of progress at the first step here, which takes longer than the others."""
    compiles = ", in which the model is compiled" if job.run.compile else ""
    return f"first step, {training.first_step + 1:,}/{training.total_steps:,}{compiles}"


def _nonfinite_guard(training: Training, job: Job, folder: Path, *, from_start: bool) -> NonFinite:
    """What to do about a step whose loss or gradient norm isn't finite; a restart leaves out the same steps again."""
    return NonFinite(
        job.run.on_nonfinite,
        folder,
        samples_of=training.samples_of,
        writes=training.session.is_main,
        norms_may_overflow=job.recipe.precision == "fp16",
        left_out=frozenset() if from_start else results.agreed(left_out(folder)),
    )


def _profiler(training: Training, job: Job) -> StepProfiler | None:
    """Create the profiler of the training's steps if the job asks for one."""
    if job.run.profile is None:
        return None
    training.profiler = StepProfiler(
        job.run.profile,
        first_step=training.first_step,
        total_steps=training.total_steps,
        device=training.session.world.device,
    )
    training.session.trainer.clock = training.profiler.clock
    return training.profiler


def _profile(training: Training, job: Job, folder: Path) -> Profile | None:
    """Gather the profile of all ranks; every rank must call it."""
    if training.profiler is None or job.run.profile is None:
        return None
    place = job.run.profile.folder or folder / PROFILE_FOLDER
    return training.profiler.gather(place, rank=training.session.world.rank, layout=str(training.session.layout))


def _prepare(training: Training, job: Job, supervision: RankSupervision) -> None:
    """Set up the trainer, and send the first report to the watchdog."""
    trainer = training.session.trainer
    if isinstance(trainer, Skipping):
        trainer.skips_nonfinite = job.run.on_nonfinite == "skip"
    if trainer.free_running:
        supervision.ask_seldom()
    supervision.pace.elsewhere = trainer.elsewhere_seconds
    supervision.check(training.total_steps)


def _finish(
    job: Job,
    training: Training,
    log: StepLog,
    metrics: dict[str, Any],
    folder: Path,
    checkpoints: Checkpoints,
    supervision: RankSupervision,
    stopped: Stopped | None,
) -> TrainResult:
    """Gather the ranks' results, and write the run's files on rank 0."""
    session, task = training.session, training.task
    timeline = session.trainer.timeline
    if job.run.rank_lines:
        lines = log.tally.gather(session.mesh.data_group)
        if session.is_main:
            print("\n".join(lines), flush=True)
    peaks = results.gather_peak_memory(session)
    samples_per_second = log.samples / log.seconds if log.seconds else 0.0
    result = TrainResult(
        metrics=metrics,
        losses=tuple(log.losses),
        final_terms=log.terms,
        first_step=training.first_step,
        steps=training.total_steps if stopped is None else stopped.step,
        stopped_early=None if stopped is None else stopped.reason,
        seconds=log.seconds,
        evaluation_seconds=training.evaluation_seconds,
        checkpoint_seconds=checkpoints.waited_seconds,
        checkpoints_skipped=log.skipped(),
        samples_per_second=samples_per_second,
        speeds=speeds(samples_per_second, task.work(), job.recipe.precision, session.world.device),
        folder=folder,
        usage=usages.gather(training.usage),
        sent_bytes=log.sent,
        own_step_seconds=results.gather_own_step_seconds(supervision.pace.seconds()),
        profile=_profile(training, job, folder),
    )
    with session.trainer.averaged():
        state = session.trainer.state_to_write(kept=session.is_main)
        if training.recipe.average is not None:  # it may share the model's memory
            state = {name: value.clone() for name, value in state.items()}
    schedule = timeline.gathered() if timeline is not None else None
    if session.is_main:
        results.write(result, session, peaks=peaks, state=state, schedule=schedule, held=supervision.held)
    return result


def measured_step(total_steps: int, first_step: int = 0) -> int:
    """The third step, or the last of fewer: optimizer state and buffers are allocated in the first two."""
    return min(first_step + 2, total_steps - 1)


def try_out(job: Job, task: Task, world: World, layout: Layout, findings: Findings | None = None) -> Sequence[Usage]:
    """Take the steps up to the measured one, write nothing, and return every rank's usage.

    `findings`: about the model, which other layouts in this process share.
    """
    training = Training(job, task, world, layout, findings=findings)
    last = training.measured_step
    for _ in training.steps(stop=last + 1, measured=last):
        pass
    return usages.gather(training.usage)


_MOST = 5  # rollbacks; a training that needs more of them has another fault


def fit_with_rollbacks(
    job: Job, task: Task, world: World, layout: Layout, supervision: RankSupervision
) -> TrainResult:
    """Call `fit`, and with `on_nonfinite: rollback` again from the last checkpoint after NonFiniteError.

    Raises NonFiniteError, on every rank, for other settings and after `_MOST` rollbacks.
    """
    from_start = not supervision.goes_on(job)
    for _ in range(_MOST):
        try:
            return fit(job, task, world, layout, supervision, from_start=from_start)
        except NonFiniteError as error:
            if job.run.on_nonfinite != "rollback":
                raise
            if world.rank == 0:
                print(f"samestep: {error}; back to the last checkpoint, without this batch", file=sys.stderr)
            job, from_start = again(job), False
    return fit(job, task, world, layout, supervision, from_start=from_start)
