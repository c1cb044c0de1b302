"""A whole training on one rank: build, step, evaluate, record."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from samestep.cluster.world import World
from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.engines.resolve import resolve as resolve_engine
from samestep.job import Job
from samestep.layout import Layout
from samestep.parallel.initial import InitialModel, build_recorded
from samestep.parallel.spread import Details
from samestep.tasks.base import Batch, Task
from samestep.tasks.rms_norm import widen_norms
from samestep.training import result as results
from samestep.training import usage as usages
from samestep.training.checkpoints import Checkpoints
from samestep.training.dropout import switch_off
from samestep.training.optimizer import make_optimizer, make_schedule
from samestep.training.progress import Bar
from samestep.training.records import Records
from samestep.training.result import TrainResult
from samestep.training.session import Session
from samestep.training.speed import speeds
from samestep.training.tally import Tally
from samestep.training.usage import Usage


class Training:
    """A recipe's task, model and batches in a session. `verify` takes a few steps of it, `train` all."""

    def __init__(self, job: Job, task: Task, world: World, layout: Layout) -> None:
        recipe = job.recipe
        self.recipe = recipe
        self.task = task
        self.usage: Usage | None = None
        self.evaluation_seconds = 0.0
        self.session = Session(
            world=world,
            layout=layout,
            engine=resolve_engine(job.run.engine),
            precision=recipe.precision,
            clip=recipe.clip,
            seed=recipe.seed,
            micro_batch=job.run.micro_batch,
            workers=job.run.workers,
        )
        self.samples = task.train_set()
        self.steps_per_epoch = -(-len(self.samples) // recipe.batch)
        self.total_steps = recipe.total_steps(self.steps_per_epoch)
        self.first_step = 0  # above 0 where it goes on from a checkpoint
        built = build_model(task, recipe.seed, recorded=self.session.engine.can_fill(layout))
        if not recipe.dropout:
            switch_off(built.model)
        if recipe.precision == "fp64":
            widen_norms(built.model)
        self.session.prepare_with(
            built.model,
            optimizer_of=partial(make_optimizer, recipe.optimizer),
            schedule_of=partial(make_schedule, recipe.schedule, self.total_steps),
            details=Details(
                example=self._example(),
                initial=built.values,
                tensor_plan=job.run.tensor_plan,
                cut_at=job.run.cut_at or (),
                compile=job.run.compile,
                offload_folder=job.run.offload_folder,
                engine_config=job.run.engine_config,
                batch=recipe.batch,
                micro_batch=job.run.micro_batch,
            ),
        )

    def _example(self) -> Any:
        """What the model is called with: the inputs of the first samples."""
        first = [self.samples[index] for index in range(min(2, len(self.samples)))]
        return Batch(*self.task.collate(first)).inputs

    def late_step(self) -> int:
        """The last step of a whole batch, where there is one: what a step looks like when all is warm."""
        last = self.total_steps - 1
        short = (last + 1) % self.steps_per_epoch == 0 and len(self.samples) % self.recipe.batch > 0
        return last - 1 if short and last else last

    def steps(
        self, stop: int | None = None, *, measured: int | None = None
    ) -> Iterator[tuple[StepBatch, StepReport]]:
        """Take steps up to `stop` or the end, one for each that is asked for; `usage` is of step `measured`."""
        batches = self.session.batches(
            self.samples,
            batch=self.recipe.batch,
            collate=self.task.collate,
            start=self.first_step,
            steps=min(stop or self.total_steps, self.total_steps),
        )
        for batch in batches:
            take = partial(self.session.step, batch, self.task.loss)
            if batch.step == measured:
                report, self.usage = usages.measured(self.session.trainer, take)
            else:
                report = take()
            yield batch, report

    @property
    def measured_step(self) -> int:
        """The step that is measured: the third where there is one; state and buffers are made in the first two."""
        return min(self.first_step + 2, self.total_steps - 1)

    def evaluate(self, bar: Bar | None = None) -> dict[str, Any]:
        """The task's metrics over its held-out samples; nothing where it has none."""
        samples = self.task.eval_set()
        if samples is None or len(samples) == 0:
            return {}
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


def build_model(task: Task, seed: int, *, recorded: bool = False) -> InitialModel:
    """The task's model with the initial weights of this seed: the same in every process and for every layout.

    `recorded`: its parameters are still to be filled with them, where its construction lets them be.
    """

    def make() -> torch.nn.Module:
        torch.manual_seed(seed)
        return task.model()

    with torch.random.fork_rng(devices=[]):
        return build_recorded(make) if recorded else InitialModel(model=make(), values=None)


def fit(job: Job, task: Task, world: World, layout: Layout) -> TrainResult:
    """Train to the end on this rank; every rank returns the same result."""
    training = Training(job, task, world, layout)
    session = training.session
    folder = results.folder_of(job)
    timeline = session.trainer.timeline
    if timeline is not None:
        timeline.step = training.late_step()
    with Checkpoints(job, session, folder) as checkpoints:
        training.first_step = checkpoints.resume(training.steps_per_epoch)
        bar = Bar(f"train {layout}", training.total_steps, first=training.first_step, shown=session.is_main)
        with (
            Records(
                folder if session.is_main else None, first_step=training.first_step, tensorboard=job.run.tensorboard
            ) as records,
            bar,
        ):
            log = StepLog(records, bar, Tally(len(training.samples)), losses=results.agreed(records.losses))
            take_all_steps(training, log, checkpoints)
            metrics = training.evaluate(bar)
            records.evaluation(training.total_steps, metrics)
        checkpoints.save(training.total_steps, metrics)
    if job.run.rank_lines:
        lines = log.tally.gather(session.mesh.data_group)
        if session.is_main:
            print("\n".join(lines), flush=True)
    peaks = results.gather_peak_memory(session)
    samples_per_second = log.samples / log.seconds if log.seconds else 0.0
    result = TrainResult(
        metrics=metrics,
        losses=tuple(log.losses),
        first_step=training.first_step,
        steps=training.total_steps,
        seconds=log.seconds,
        evaluation_seconds=training.evaluation_seconds,
        checkpoint_seconds=checkpoints.waited_seconds,
        samples_per_second=samples_per_second,
        speeds=speeds(samples_per_second, task.work(), job.recipe.precision, world.device),
        folder=folder,
        usage=usages.gather(training.usage),
    )
    state = session.trainer.state()
    schedule = timeline.gathered() if timeline is not None else None
    if session.is_main:
        results.write(result, session, peaks=peaks, state=state, schedule=schedule)
    return result


def try_out(job: Job, task: Task, world: World, layout: Layout) -> Sequence[Usage]:
    """Take the few steps up to the one that is measured, write nothing, and say what every rank held and sent."""
    training = Training(job, task, world, layout)
    last = training.measured_step
    for _ in training.steps(stop=last + 1, measured=last):
        pass
    return usages.gather(training.usage)


class StepLog:
    """Where a step's values go once they are known: the records, the bar, the sums of the final report."""

    def __init__(self, records: Records, bar: Bar, tally: Tally, losses: Sequence[float] = ()) -> None:
        self.records = records
        self.tally = tally
        self.losses = list(losses)  # of all steps, also those before a checkpoint that the records tell of
        self.samples = 0
        self.seconds = 0.0
        self.bar = bar

    def add(self, batch: StepBatch, report: StepReport, seconds: float) -> None:
        """Read a step's values, which waits until an accelerator has computed them."""
        loss = report.loss.item()
        self.losses.append(loss)
        self.samples += batch.global_samples
        self.seconds += seconds + batch.data_seconds
        self.tally.add(batch)
        self.bar.step(loss=loss, lr=report.lr, samples=batch.global_samples)
        self.records.step(
            {
                "step": batch.step,
                "epoch": batch.epoch,
                "loss": loss,
                "grad_norm": report.grad_norm.item(),
                "lr": report.lr,
                "samples": batch.global_samples,
                "step_seconds": seconds,
                "data_seconds": batch.data_seconds,
            }
        )


def take_all_steps(training: Training, log: StepLog, checkpoints: Checkpoints) -> None:
    """Take every step, each logged while the next one is computed; evaluate and save in between where asked."""
    every = training.recipe.evaluation.every
    before: tuple[StepBatch, StepReport, float] | None = None
    began = time.perf_counter()
    for batch, report in training.steps(measured=training.measured_step):
        if before is not None:
            log.add(*before)
        now = time.perf_counter()
        before = (batch, report, now - began - batch.data_seconds)
        began = now
        done = batch.step + 1
        if done == training.total_steps:
            break
        looks, saves = every is not None and done % every == 0, checkpoints.due(done)
        if looks or saves:
            log.add(*before)
            before = None
            metrics = training.evaluate(log.bar) if looks else None
            if metrics is not None:
                log.records.evaluation(done, metrics)
            if saves or checkpoints.is_best(metrics):
                checkpoints.save(done, metrics)
            began = time.perf_counter()
    if before is not None:
        log.add(*before)
