"""Session: one rank's part in a training, for `samestep.train` and for custom training loops.

Every rank makes a session. The methods that a custom loop calls (`prepare`, `batches`, `step`, `save`, ...) are
collectives: all ranks must call them in the same order.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from samestep import environment
from samestep.checkpoint.attempts import Tolerance
from samestep.checkpoint.compatibility import Base
from samestep.checkpoint.load import open_newest
from samestep.checkpoint.save import Saver
from samestep.comm.mesh import build_mesh, new_group
from samestep.comm.shared_memory import backend as shared_memory
from samestep.communication import Communication
from samestep.data.loader import Chunks, Collate, Loader, StepBatch, to_device
from samestep.data.order import SampleOrder
from samestep.data.types import Samples
from samestep.engines.base import (
    Checkpointed,
    Engine,
    Loss,
    OptimizerOf,
    Preparation,
    ScheduleOf,
    StepReport,
    Trainer,
)
from samestep.engines.checks import (
    check_average,
    check_buckets,
    check_communication,
    check_gather,
    check_layout,
    check_sparse_rows,
)
from samestep.engines.precision import parameter_dtype
from samestep.engines.registry import resolve
from samestep.errors import CheckpointError, LayoutError, NotSavedError, UserError, index_errors_explained, printable
from samestep.fault_tolerance.lease import hold
from samestep.launch.device import DeviceChoice
from samestep.launch.world import World, join
from samestep.layout import Layout, unsized
from samestep.parallel.complex_parameters import first_complex
from samestep.parallel.deferred_init import move
from samestep.parallel.exact.batch_norm import first_batch_norm
from samestep.parallel.parallel_model import Details
from samestep.parallel.pipeline.schedule import micro_batches
from samestep.parallel.sparse_rows import Choice as SparseRows
from samestep.progress.bars import Bar
from samestep.ranks import Transport
from samestep.recipe import Average, Precision, Recipe
from samestep.tasks.base import default_scores
from samestep.training import evaluation
from samestep.training.adapters import AdapterFacts, facts_of
from samestep.training.evaluation import Scores
from samestep.training.learned_from import nothing_to_compare
from samestep.training.own_data import OwnData
from samestep.training.own_loop import (
    OwnOptimizers,
    check_dealt,
    check_lengths,
    check_prepared,
    check_step,
    no_schedule,
)
from samestep.training.state import base_of, load_state, save_state

if TYPE_CHECKING:
    from samestep.tasks.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The step at which a custom loop resumes."""

    step: int  # the number of the next step, counted from 0
    extra: Mapping[str, Any]  # what was given to `save`


OneOrSeveral = TypeVar("OneOrSeveral", bound=Optimizer | Sequence[Optimizer])


class Session:
    """One rank of a training: spreads a model, deals out samples, takes steps, evaluates."""

    def __init__(
        self,
        *,
        world: World,
        layout: Layout,
        engine: Engine,
        precision: Precision = "fp32",
        clip: float | None = None,
        seed: int = 0,
        workers: int = 0,
        communication: Communication | None = None,
        average: Average | None = None,
        master_weights: bool = False,
        details: Details | None = None,
    ) -> None:
        """`details`: how models are spread, beyond the layout."""
        details = details or Details()
        layout.check_processes(world.world_size)
        check_layout(engine, layout, precision, details.engine_config)
        check_communication(communication, engine, layout, precision)
        check_buckets(details.bucket_mb, engine, layout, communication)
        check_sparse_rows(details.sparse_rows, engine, layout, communication)
        check_average(average, engine)
        self.world = world
        self.layout = layout
        self.engine = engine
        self.mesh = build_mesh(layout, world.device.type)
        self._precision = precision
        self._dtype = parameter_dtype(precision)  # of floating-point tensors in batches
        self._master_weights = master_weights
        self._clip = clip
        self._seed = seed
        self._workers = workers
        self._communication = communication
        self._average = average
        self.details = details
        self._trainer: Trainer | None = None
        self._undivided = False  # whether the model needs a rank's samples of a step in one forward
        self._savers: dict[Path, Saver] = {}
        self._leases = ExitStack()  # of the folders with checkpoints, on the main rank
        self._group: ProcessGroup | None = None
        self._base: Base | None = None
        self._own_data = OwnData()  # of a custom loop
        self.adapter: AdapterFacts | None = None  # of the prepared model

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that talks to the user and writes files."""
        return self.world.rank == 0

    @property
    def trainer(self) -> Trainer:
        """The trainer. Raises UserError before `prepare` was called."""
        if self._trainer is None:
            raise UserError("session.prepare(model, optimizer) must come before the first step")
        return self._trainer

    def prepare(
        self,
        model: nn.Module,
        optimizer: OneOrSeveral,
        example: Any = None,
        *,
        batch_buffers: Mapping[str, str] | None = None,
    ) -> tuple[nn.Module, OneOrSeveral]:
        """Spread a model and its optimizer, which must not have stepped yet, and return both.

        Several optimizers are given as a list, such as Muon for the hidden matrices and AdamW for the rest.

        The model must be the same on every rank: build it under `torch.manual_seed(...)`. Tensor, pipeline, context
        and expert parallel layouts also need an `example`: inputs of the model for a few samples. `batch_buffers` is
        as in `Task.batch_buffers`.
        """
        check_prepared(model, optimizer)
        self._own_data.uses({type(module) for module in model.modules()})
        if not isinstance(optimizer, Optimizer) and not self.engine.abilities.own_optimizers:
            raise UserError(
                f'session.prepare: engine "{self.engine.name}" takes one optimizer; give one, or use engine native'
            )
        self.prepare_with(
            model,
            optimizer_of=OwnOptimizers(optimizer, model),
            schedule_of=no_schedule,
            details=replace(self.details, example=example, batch_buffers=batch_buffers or {}),
        )
        return model, optimizer

    def prepare_with(
        self,
        model: nn.Module,
        *,
        optimizer_of: OptimizerOf,
        schedule_of: ScheduleOf,
        details: Details,
        recipe: Recipe | None = None,
    ) -> Trainer:
        """Spread a model, and make its optimizer and schedule from the parameters that this rank then holds.

        `recipe`: the model's recipe, if it has one.
        """
        self.adapter = facts_of(model, recipe)
        self._undivided = first_batch_norm(model) is not None
        _check_complex(model, self.engine)
        move(model, self.world.device, parameter_dtype(self._precision, master_weights=self._master_weights))
        if details.example is not None:
            details = replace(details, example=to_device(details.example, self.world.device, self._dtype))
        with index_errors_explained("the first samples"):  # some layouts run the model with them
            self._trainer = self.engine.prepare(
                model,
                Preparation(
                    layout=self.layout,
                    mesh=self.mesh,
                    device=self.world.device,
                    precision=self._precision,
                    clip=self._clip,
                    optimizer_of=optimizer_of,
                    schedule_of=schedule_of,
                    details=details,
                    average=self._average,
                    communication=self._communication,
                    master_weights=self._master_weights,
                ),
            )
        # The seed of the model's own random numbers, which are not the same for all layouts: data ranks have
        # different samples, so they draw different numbers. Dropout does not use this generator.
        torch.manual_seed(self._seed * 1_000_003 + self.mesh.data_place.index)
        return self._trainer

    def batches(
        self,
        samples: Samples,
        *,
        batch: int,
        collate: Collate,
        steps: int | None = None,
        epochs: int = 1,
        start: int = 0,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
    ) -> Loader:
        """A loader of this rank's part of each global batch of `batch` samples, for `steps` steps or `epochs` epochs.

        `lengths`: the length of each sample, by which a rank's micro-batches then group samples, for less padding.
        """
        check_dealt(samples, collate, "session.batches", batch=batch, steps=steps, epochs=epochs)
        self.layout.check_batch(batch, self.details.micro_batch)
        order = SampleOrder(
            size=len(samples),
            batch=batch,
            seed=self._seed,
            shuffle=shuffle,
            lengths=None if lengths is None else check_lengths(lengths, samples, "session.batches"),
            virtual_ranks=self.details.virtual_ranks,
        )
        loader = Loader(
            samples,
            collate,
            order,
            place=self.engine.training_place(
                self.mesh.data_place, self.layout, self.world.rank, self.details.engine_config
            ),
            device=self.world.device,
            dtype=self._dtype,
            start=start,
            stop=steps if steps is not None else epochs * order.steps_per_epoch,
            micro_batch=self.details.micro_batch,
            micro_batches=partial(self._micro_batches, batch),
            workers=self._workers,
        )
        if loader.stop > loader.start:
            self._own_data.dealt(samples, collate, self._checkpoint_group, self.warn)
        return loader

    def _micro_batches(self, batch: int) -> int | None:
        """The number of micro-batches of a step, which is known once the model is."""
        return micro_batches(self.layout, batch, self.details.micro_batch, undivided=self._undivided)

    def save(self, folder: str | Path, *, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save the training's state after `step` steps into `folder/step-<step>`; every rank must call it.

        The call returns once the state is copied in memory; files are written in the background of the next steps.
        Frozen parameters of a model with adapters (PEFT's) are not saved, so a loop that resumes must build them
        again. `extra` is any value that JSON can hold, such as a schedule's state, and `resume` returns it. A save
        that the system refuses is tried again and then skipped, with a warning. Raises CheckpointError if the folder
        can't be written at the first call, or another training saves there, NotSavedError after six saves in a row
        that failed, and at the session's end if the last one did.
        """
        folder = Path(folder)
        if folder not in self._savers:
            self._find_base(self._checkpointed("save"))
            self._savers[folder] = Saver(
                folder, self._checkpoint_group(), asynchronous=True, tolerance=Tolerance(warn=self.warn)
            )
            self._hold(folder, self._savers[folder])
            self._savers[folder].prepare()
        save_state(
            self._checkpointed("save"),
            self._savers[folder],
            self.world,
            self.layout,
            engine=self.engine.name,
            step=step,
            extra=extra,
            base=self._base,
            identity=self._own_data.identity() if self.is_main else None,  # rank 0 writes it
        )

    def resume(self, place: str | Path, *, accept_data: bool = False) -> Resumed:
        """Load a checkpoint, or the newest one in a folder, saved under any layout; every rank must call it.

        Returns the number of steps that it had taken and its `extra`; 0 steps if there is no checkpoint. The data set
        that is then given to `batches` must be that of the checkpoint, unless `accept_data` allows another. Raises
        CheckpointError if the checkpoint is damaged or of another model.
        """
        trainer = self._checkpointed("resume")
        self._find_base(trainer)
        loader = open_newest((Path(place),), self._checkpoint_group(), self.warn)
        if loader is None:
            return Resumed(step=0, extra={})
        load_state(trainer, loader, self.world, self.layout)
        self._own_data.resumed(loader, accepts=accept_data)
        if loader.info.identity is None and loader.info.step:
            self.warn(nothing_to_compare(loader.folder))
        return Resumed(step=loader.info.step, extra=loader.info.extra)

    def warn(self, text: str) -> None:
        """Print a message for the user on the main rank."""
        if self.is_main:
            print(f"samestep: {printable(text)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Wait until every checkpoint is written. Raises NotSavedError if a folder's last one can't be."""
        for saver in self._savers.values():
            saver.wait()
        for saver in self._savers.values():
            if saver.tally is not None and saver.tally.failing:
                raise NotSavedError(f"{saver.tally.reason}; {saver.tally.kept}", at_end=True)

    def release(self) -> None:
        """Leave the checkpoints' folders to other trainings."""
        self._leases.close()

    def _hold(self, folder: Path, saver: Saver) -> None:
        """Hold the lease of a folder on the main rank, to the session's end. Raises CheckpointError on all ranks."""

        def take() -> None:
            """Hold it, on the main rank."""
            if self.is_main:
                round_ = environment.round_of_rank()
                try:
                    lease = hold([folder], job=None if round_ is None else round_.start)
                    saver.held = self._leases.enter_context(lease)
                except UserError as error:
                    raise CheckpointError(f"session.save: {error}") from None

        saver.together(take, folder)

    def _checkpointed(self, what: str) -> Checkpointed:
        """The trainer. Raises UserError for `session.<what>` if its engine saves no checkpoints."""
        if not isinstance(self.trainer, Checkpointed):
            raise UserError(f'session.{what}: engine "{self.engine.name}" saves no checkpoints; use native')
        return self.trainer

    def _find_base(self, trainer: Checkpointed) -> None:
        """Find, before anything is written, the frozen parameters that checkpoints of an adapter leave out."""
        if self._base is None and self.adapter is not None:
            self._base = base_of(trainer, self.adapter, self._checkpoint_group())

    def _checkpoint_group(self) -> ProcessGroup:
        """A Gloo group of all ranks, apart from the training's groups, so that checkpoints' messages don't mix in."""
        if self._group is None:
            self._group = new_group(range(self.world.world_size), backend="gloo")
        return self._group

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Run forward, backward, clipping and update. `loss(output, batch)` returns a sum and a count, not a mean."""
        check_step(batch, loss)
        check_gather(loss, self.engine, self._communication)
        if self.is_main:
            self._own_data.stepped(loss, self.warn)
        return self.trainer.step(batch, loss)

    def evaluate(
        self,
        samples: Samples,
        *,
        collate: Collate,
        metrics: "Mapping[str, Metric]",
        scores: Scores = default_scores,
        batch: int = 64,
        class_names: Sequence[str] | None = None,
        bar: Bar | None = None,
    ) -> dict[str, Any]:
        """Evaluate metrics over all ranks, each sample once; returns the same values on every rank."""
        check_dealt(samples, collate, "session.evaluate", batch=batch)
        chunks = Chunks(
            samples,
            collate,
            size=batch,
            place=self.mesh.data_place,
            device=self.world.device,
            dtype=self._dtype,
            workers=self._workers,
        )
        with (
            bar.part("evaluate", len(chunks)) if bar is not None else nullcontext() as advance,
            self.trainer.averaged(),
        ):
            return evaluation.evaluate(
                self.trainer,
                chunks,
                metrics=metrics,
                scores=scores,
                group=self.mesh.loss_group,
                at_once=2 * self.layout.pipeline if self.layout.pipeline > 1 else 1,
                class_names=class_names,
                advance=advance,
            )


@contextmanager
def session(
    layout: str | Layout = "ddp",
    *,
    engine: str | Engine = "native",
    precision: Precision = "fp32",
    clip: float | None = None,
    seed: int = 0,
    micro_batch: int | None = None,
    threads: int | None = None,
    workers: int = 0,
    device: DeviceChoice = "auto",
    tensor_plan: Mapping[str, str] | None = None,
    expert_plan: Mapping[str, str] | None = None,
    cut_at: Sequence[str] | None = None,
    compile: bool = False,
    loss_chunk: int | None = None,
    offload_folder: Path | None = None,
    engine_config: Path | None = None,
    transport: Transport = "auto",
    bucket_mb: float | None = None,
    sparse_rows: SparseRows = "auto",
    average: Average | None = None,
) -> Iterator[Session]:
    """Open a session in a custom script; under torchrun, this process is the rank that torchrun started.

    Without torchrun it is the only process, and a layout without a size ("ddp") has one rank. Raises LayoutError if
    the layout doesn't fit the number of processes.
    """
    ranks = environment.ranks()
    processes = ranks.world_size if ranks else 1
    parsed = _parse(layout, processes, started=ranks is not None)
    resolved = resolve(engine)
    joined = join(
        device=device,
        threads=threads,
        cpu_backend=shared_memory.for_transport(transport if resolved.abilities.shared_memory else "gloo"),
        share_devices=transport == "gloo",
    )
    with resolved.in_this_process(), joined as world:
        training = Session(
            world=world,
            layout=parsed,
            engine=resolved,
            precision=precision,
            clip=clip,
            seed=seed,
            workers=workers,
            average=average,
            details=Details(
                tensor_plan=tensor_plan,
                expert_plan=expert_plan,
                cut_at=cut_at or (),
                compile=compile,
                loss_chunk=loss_chunk,
                bucket_mb=bucket_mb,
                offload_folder=offload_folder,
                engine_config=engine_config,
                sparse_rows=sparse_rows,
                micro_batch=micro_batch,
            ),
        )
        try:
            yield training
            training.close()  # not after an error, when other ranks may be gone
        finally:
            training.release()


def _check_complex(model: nn.Module, engine: Engine) -> None:
    """Raise UserError for a complex parameter if the engine would lose its imaginary part."""
    name = first_complex(model)
    if name is not None and not engine.abilities.complex_parameters:
        raise UserError(f'engine "{engine.name}": the parameter {name} is complex; use engine native')


def _parse(layout: str | Layout, processes: int, *, started: bool) -> Layout:
    """The layout for this number of processes. Raises LayoutError if it doesn't fit, or needs torchrun."""
    if isinstance(layout, str):
        layout = Layout.parse(layout, processes if unsized(layout) else None)
    if layout.size > 1 and not started:
        raise LayoutError(
            f'layout "{layout}" needs {layout.size} processes and this is one alone; start the script by '
            f"torchrun --nproc-per-node={layout.size} script.py"
        )
    layout.check_processes(processes)
    return layout
