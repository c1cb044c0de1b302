"""Session: one rank's part in a training, for `samestep.train` and for custom training loops.

Every rank makes a session. The methods that a custom loop calls (`prepare`, `batches`, `step`, `save`, ...) are
collectives: all ranks must call them in the same order.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samestep import environment
from samestep.checkpoint.attempts import Tolerance
from samestep.checkpoint.compatibility import Base
from samestep.checkpoint.load import open_newest
from samestep.checkpoint.save import Saver
from samestep.comm.mesh import build_mesh, new_group
from samestep.comm.shared_memory import backend as shared_memory
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
from samestep.options import Options, OwnLoopOptions
from samestep.parallel.complex_parameters import first_complex
from samestep.parallel.deferred_init import move
from samestep.parallel.exact.batch_norm import first_batch_norm
from samestep.parallel.parallel_model import ModelDetails
from samestep.parallel.pipeline.schedule import micro_batches
from samestep.progress.bars import Bar
from samestep.ranks import Transport
from samestep.recipe import Recipe
from samestep.tasks.base import default_scores
from samestep.training import evaluation
from samestep.training.adapters import AdapterFacts, facts_of
from samestep.training.evaluation import Scores
from samestep.training.learned_from import nothing_to_compare
from samestep.training.own_data import OwnData
from samestep.training.own_loader import dealt_parts
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


_EVALUATED_AT_ONCE = 64  # samples

OneOrSeveral = TypeVar("OneOrSeveral", bound=Optimizer | Sequence[Optimizer])


class Session:
    """One rank of a training: spreads a model, deals out samples, takes steps, evaluates."""

    def __init__(self, *, world: World, layout: Layout, engine: Engine, options: Options) -> None:
        """The layout and the options were checked: those of a job by `samestep.door`, others by `session`."""
        layout.check_processes(world.world_size)
        self.world = world
        self.layout = layout
        self.engine = engine
        self.mesh = build_mesh(layout, world.device.type)
        self.options = options
        self._dtype = parameter_dtype(options.precision)  # of floating-point tensors in batches
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
            details=ModelDetails(example=example, batch_buffers=batch_buffers or {}),
        )
        return model, optimizer

    def prepare_with(
        self,
        model: nn.Module,
        *,
        optimizer_of: OptimizerOf,
        schedule_of: ScheduleOf,
        details: ModelDetails,
        recipe: Recipe | None = None,
    ) -> Trainer:
        """Spread a model, and make its optimizer and schedule from the parameters that this rank then holds.

        `recipe`: the model's recipe, if it has one.
        """
        self.adapter = facts_of(model, recipe)
        self._undivided = first_batch_norm(model) is not None
        _check_complex(model, self.engine)
        move(
            model,
            self.world.device,
            parameter_dtype(self.options.precision, master_weights=self.options.master_weights),
        )
        if details.example is not None:
            details = replace(details, example=to_device(details.example, self.world.device, self._dtype))
        with index_errors_explained("the first samples"):  # some layouts run the model with them
            self._trainer = self.engine.prepare(
                model,
                Preparation(
                    layout=self.layout,
                    mesh=self.mesh,
                    device=self.world.device,
                    options=self.options,
                    optimizer_of=optimizer_of,
                    schedule_of=schedule_of,
                    details=details,
                ),
            )
        # The seed of the model's own random numbers, which are not the same for all layouts: data ranks have
        # different samples, so they draw different numbers. Dropout does not use this generator.
        torch.manual_seed(self.options.seed * 1_000_003 + self.mesh.data_place.index)
        return self._trainer

    def batches(
        self,
        samples: Samples | DataLoader[Any],
        *,
        batch: int | None = None,
        collate: Collate | None = None,
        steps: int | None = None,
        epochs: int = 1,
        start: int = 0,
        shuffle: bool | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Loader:
        """A loader of this rank's part of each global batch of `batch` samples, for `steps` steps or `epochs` epochs.

        `samples` may be a DataLoader, whose data set, batch size, collate function, shuffling and workers are taken;
        its batch size is that of one process (with a DistributedSampler, of each of its ranks). `collate`: without
        one, samples are stacked. `shuffle`: yes, unless it is False. `lengths`: the length of each sample, by which a
        rank's micro-batches then group samples, for less padding.
        """
        parts = dealt_parts(samples, "session.batches", batch=batch, collate=collate, shuffle=shuffle)
        samples, collate, batch = parts.samples, parts.collate, parts.batch
        if parts.unused is not None:
            self.warn(parts.unused)
        check_dealt(samples, collate, "session.batches", batch=batch, steps=steps, epochs=epochs)
        self.layout.check_batch(batch, self.options.micro_batch)
        order = SampleOrder(
            size=len(samples),
            batch=batch,
            seed=self.options.seed,
            shuffle=parts.shuffle,
            drop_last=parts.drop_last,
            lengths=None if lengths is None else check_lengths(lengths, samples, "session.batches"),
            virtual_ranks=self.options.virtual_ranks,
        )
        loader = Loader(
            samples,
            collate,
            order,
            place=self.engine.training_place(
                self.mesh.data_place, self.layout, self.world.rank, self.options.engine_config
            ),
            device=self.world.device,
            dtype=self._dtype,
            start=start,
            stop=steps if steps is not None else epochs * order.steps_per_epoch,
            micro_batch=self.options.micro_batch,
            micro_batches=partial(self._micro_batches, batch),
            workers=self.options.workers or parts.workers,
        )
        if loader.stop > loader.start:
            self._own_data.dealt(samples, collate, self._checkpoint_group, self.warn)
        return loader

    def _micro_batches(self, batch: int) -> int | None:
        """The number of micro-batches of a step, which is known once the model is."""
        return micro_batches(self.layout, batch, self.options.micro_batch, undivided=self._undivided)

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
        check_gather(loss, self.engine, self.options.communication)
        if self.is_main:
            self._own_data.stepped(loss, self.warn)
        return self.trainer.step(batch, loss)

    def evaluate(
        self,
        samples: Samples | DataLoader[Any],
        *,
        collate: Collate | None = None,
        metrics: "Mapping[str, Metric]",
        scores: Scores = default_scores,
        batch: int | None = None,
        class_names: Sequence[str] | None = None,
        bar: Bar | None = None,
    ) -> dict[str, Any]:
        """Evaluate metrics over all ranks, each sample once; returns the same values on every rank.

        `samples` may be a DataLoader, as in `batches`; else `batch` samples, 64 unless it says otherwise, go through
        the model at once.
        """
        if batch is None and not isinstance(samples, DataLoader):
            batch = _EVALUATED_AT_ONCE
        parts = dealt_parts(samples, "session.evaluate", batch=batch, collate=collate)
        samples, collate, batch = parts.samples, parts.collate, parts.batch
        check_dealt(samples, collate, "session.evaluate", batch=batch)
        chunks = Chunks(
            samples,
            collate,
            size=batch,
            place=self.mesh.data_place,
            device=self.world.device,
            dtype=self._dtype,
            workers=self.options.workers or parts.workers,
            seed=self.options.seed,
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


@dataclass(frozen=True)
class SessionArguments(OwnLoopOptions):
    """The arguments of `samestep.session`: where its ranks run, and the options of a loop of one's own."""

    layout: str | Layout = "ddp"
    _: KW_ONLY
    engine: str | Engine = "native"
    threads: int | None = None
    device: DeviceChoice = "auto"
    transport: Transport = "auto"


Parameters = ParamSpec("Parameters")
Opening = Callable[[SessionArguments], AbstractContextManager[Session]]
Opened = Callable[Parameters, AbstractContextManager[Session]]


def _takes(arguments: Callable[Parameters, SessionArguments]) -> Callable[[Opening], Opened[Parameters]]:
    """Give a function the keywords of its one argument's class, where each is written with its type and default."""
    signature = inspect.signature(arguments).replace(return_annotation=inspect.Signature.empty)

    def decorate(function: Opening) -> Opened[Parameters]:
        @wraps(function)
        def opened(*positional: Parameters.args, **keywords: Parameters.kwargs) -> AbstractContextManager[Session]:
            try:
                signature.bind(*positional, **keywords)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(arguments(*positional, **keywords))

        opened.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return opened

    return decorate


@_takes(SessionArguments)
@contextmanager
def session(arguments: SessionArguments) -> Iterator[Session]:
    """Open a session in a custom script; under torchrun, this process is the rank that torchrun started.

    Without torchrun it is the only process, and a layout without a size ("ddp") has one rank. Raises LayoutError if
    the layout doesn't fit the number of processes.
    """
    ranks = environment.ranks()
    layout = _parse(arguments.layout, ranks.world_size if ranks else 1, started=ranks is not None)
    engine, options = resolve(arguments.engine), Options.of_own_loop(arguments)
    joined = join(
        device=arguments.device,
        threads=arguments.threads,
        cpu_backend=shared_memory.for_transport(arguments.transport if engine.abilities.shared_memory else "gloo"),
        share_devices=arguments.transport == "gloo",
    )
    with engine.in_this_process(), joined as world:
        _check_options(options, engine, layout)
        training = Session(world=world, layout=layout, engine=engine, options=options)
        try:
            yield training
            training.close()  # not after an error, when other ranks may be gone
        finally:
            training.release()


def _check_options(options: Options, engine: Engine, layout: Layout) -> None:
    """Raise UserError for what the engine can't do, as `samestep.door` does for a job."""
    check_layout(engine, layout, options.precision, options.engine_config)
    check_buckets(options.bucket_mb, engine, layout, options.communication)
    check_sparse_rows(options.sparse_rows, engine, layout, options.communication)
    check_average(options.average, engine)


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
