"""Engine and Trainer: what takes an optimizer step, and what it declares that it can do.

What is checked when: `Abilities` are data, compared with a job before any process starts (`registry`); `check` and
`check_task` look closer, still before; what only a model shows raises LayoutError in `prepare`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.comm.mesh import Mesh
from samestep.data.loader import StepBatch
from samestep.data.order import DataPlace
from samestep.data.types import Batch
from samestep.display.page import Words
from samestep.job import Job
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.holdings import Holdings
from samestep.parallel.parallel_model import ModelDetails
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import Piece
from samestep.profiling.clock import StepClock
from samestep.tasks.base import Task
from samestep.tasks.turns import StepTurns

# Returns the sum of the loss over a batch's terms, and the number of terms.
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | int]]
OptimizerOf = Callable[[Iterator[tuple[str, nn.Parameter]]], Optimizer]
ScheduleOf = Callable[[Optimizer], LRScheduler | None]


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an engine can do. A job that asks for more is refused before any process starts."""

    about: Words | None = None  # what takes the step, for the table of docs/engines/README.md
    axes: frozenset[str]  # mesh axes that it supports
    stages: frozenset[int] = frozenset({1, 2, 3})  # of ZeRO, where it splits the axis shard
    precisions: frozenset[str]
    recompute: frozenset[str] = frozenset({"none"})
    offload: frozenset[str] = frozenset({"none"})
    attention: frozenset[str] = frozenset({"ulysses"})  # of tokens that are split
    config: str | None = None  # name of its own configuration file, if it takes one
    packages: Mapping[str, str] = field(default_factory=dict)  # module that it needs -> how to install it
    checkpoints: bool = False  # whether its trainers are Checkpointed
    complex_parameters: bool = False  # whether its trainers keep complex parameters complex
    same_step: bool = True  # False: asynchronous or approximate, and judged by the metrics that it reaches

    profiles: bool = False  # run.profile: whether its trainers tell a clock of their phases
    buckets: bool = False  # run.bucket_mb: replicas send their gradients in buckets of that size
    shared_memory: bool = False  # whether run.transport reaches its messages: they go through torch.distributed
    sparse_rows: bool = False  # run.sparse_rows
    shares_replicas: bool = False  # run.share_replicas
    ordered: bool = False  # run.reduction: ordered
    skips: bool = False  # run.on_nonfinite: skip and rollback, for which its trainers must be Skipping
    batch_buffers: bool = False  # a task's buffers that are a mean or a sum over the batch
    compiles: bool = False  # run.compile: torch.compile for each block
    chunks_loss: bool = False  # run.loss_chunk: output layer and cross-entropy in chunks
    float32_matmul: bool = True  # run.float32_matmul: whether its products are PyTorch's
    sends_less: bool = False  # recipe.communication
    adapters: bool = False  # recipe.adapter: layers with further parameters inside, next to frozen ones
    own_optimizers: bool = False  # optimizers by name, and groups of parameters with settings of their own
    averages: bool = False  # recipe.average
    master_weights: bool = False  # recipe.master_weights
    attention_dropout: bool = False  # whether recipe.attention_dropout may be false
    several_losses: bool = False  # losses of several terms, each with its own count
    turns: bool = False  # steps in turns, each with its own loss and parameters
    gathers: bool = False  # a task's loss that couples samples, by `gather`


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a step over all ranks, as tensors, so that the host doesn't wait for an accelerator."""

    loss: Tensor  # sum over the global batch / global count
    grad_norm: Tensor  # before clipping
    lr: float
    terms: Mapping[str, Tensor] = field(default_factory=dict)  # the loss's parts by name, where it has some
    sent: int | None = None  # bytes that this rank sent in the step, where they are counted in every step


class Trainer(ABC):
    """A model and its optimizer on one rank, spread as the layout says."""

    timeline: Timeline | None = None  # records a pipeline's actions in one step
    free_running: bool = False  # whether ranks may be in different steps
    clock: StepClock | None = None  # times the phases of a step, if steps are profiled

    @abstractmethod
    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Forward, backward, clip, update, advance the schedule: one step of the global batch.

        `NativeTrainer` does so for most engines. Another trainer keeps the step that of one process if it

        - runs each forward and its loss inside `ForwardContext.at(micro_batch.moment)`, and calls the model by
          `call` (`tasks/base.py`);
        - runs forward, backward and `predict` inside `Precision.throughout` (`engines/precision.py`), without which a
          model that casts to float32 fails its proof in float64;
        - divides the summed losses by the summed count of all ranks, at least 1, and multiplies by
          `micro_batch.weight` where ranks share a batch;
        - clips as PyTorch does, by limit / (norm + 1e-6);
        - runs the second and later forwards inside `RepeatedForwards.watched`, and after the first step calls its
          `check` and `check_buffers` (`parallel/exact/buffers.py`);
        - wraps the step in `index_errors_explained` (`errors.py`).
        """

    def settle(self) -> None:
        """Wait until the last step's parameters have arrived on this rank; the trainer's own methods do so."""
        return

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Run the model in evaluation mode, without gradients; None on ranks that don't have the output."""

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model has the moving average of its weights, if one is kept; every rank enters."""
        return nullcontext()

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by its name in the model; the same on every rank."""

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter, key, values) of the optimizer's unsharded state, as far as it can be read.

        `keys`: the keys to look for, whose state has the parameter's shape. Every rank asks.
        """
        yield from ()

    @abstractmethod
    def holdings(self) -> Holdings:
        """What this rank holds when a step is over."""

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank sends in one step by other ways than torch.distributed, by kind of collective."""
        return {}

    def measured(self) -> Mapping[str, Any]:
        """Measurements specific to the engine, for the report, which takes rank 0's."""
        return {}

    def elsewhere_seconds(self) -> float:
        """CPU seconds that helper processes have used for this rank so far."""
        return 0.0

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers, on the CPU."""

    def state_to_write(self, *, kept: bool) -> dict[str, Tensor]:
        """`state` on ranks with `kept`, empty on the others; every rank must ask."""
        state = self.state()
        return state if kept else {}


def scale_to_mean(mesh: Mesh, batch: StepBatch) -> float:
    """The factor of a rank's loss sum for which the average over the data ranks is sum / samples.

    The number of samples is known before any message is sent; the count of terms only after the last forward.
    """
    return mesh.data_place.of / batch.global_samples


class TurnTaking(Trainer):
    """A trainer that can take a step in turns, such as those of a GAN's two networks."""

    @abstractmethod
    def step_in_turns(self, batch: StepBatch, turns: StepTurns) -> StepReport:
        """Take one step with several losses in turn; each updates its own parameters before the next forward."""


class Skipping(Trainer):
    """A trainer that can skip a step."""

    skips_nonfinite: bool = False  # a step whose loss or gradient norm isn't finite changes nothing but the schedule

    @abstractmethod
    def pass_over(self) -> float:
        """Skip a step: advance only the schedule. Returns the step's learning rate."""


class Checkpointed(Trainer):
    """A trainer whose state can be saved under its layout and read under any other.

    Tensors go by names that no layout changes: `model.<parameter or buffer>`, `optimizer.<parameter>.<key>`.
    """

    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """The whole model's tensors; the same on every rank."""

    @abstractmethod
    def frozen(self) -> frozenset[str]:
        """The whole model's parameters that need no gradient; the same on every rank."""

    @abstractmethod
    def tied(self) -> Mapping[str, str]:
        """Further names of tied parameters -> the name under which the parameter is saved."""

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """This rank's pieces of the model and of the optimizer's state; every rank asks."""

    @abstractmethod
    def scaler_state(self) -> dict[str, float]:
        """State of the loss scaler under fp16; the same on every rank."""

    @abstractmethod
    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        """Load the state saved after `step` steps. `read` fills pieces in place; every rank calls it once."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The layout of a model on this rank, and what its trainer takes."""

    layout: Layout
    mesh: Mesh
    device: torch.device
    options: Options
    optimizer_of: OptimizerOf  # from the parameters that this rank then holds
    schedule_of: ScheduleOf
    details: ModelDetails


class Engine(ABC):
    """Makes a Trainer of a model."""

    name: ClassVar[str]
    abilities: ClassVar[Abilities]

    def can_fill(self, layout: Layout) -> bool:
        """Whether `prepare` accepts a model on the meta device under this layout, and fills in the initial values."""
        return False

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        """Raise UserError for a task that this engine can't train so. It is called before any process starts."""
        return

    def training_place(self, place: DataPlace, layout: Layout, rank: int, config: Path | None) -> DataPlace:
        """The slice of each global batch that a rank trains on; `place`: its slice if all data ranks train."""
        return place

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        """Raise UserError for what its abilities don't say, such as a mistake in its own configuration file.

        Called before any process starts, where its packages are there, and once more by a loop of one's own.
        """
        return

    def settle(self, job: Job, layout: Layout) -> tuple[Job, Layout]:
        """The job and its layout as the engine's own configuration completes them, before any process starts.

        Raises UserError for what the configuration and the job say differently, and for layouts that the engine
        can't have.
        """
        return job, layout

    def make_ready(self, job: Job, layout: Layout) -> None:
        """Build what the engine needs for a settled job, such as extensions; called after all checks.

        Called before any process starts, or by each rank if a launcher started them. Raises UserError if the build
        fails.
        """
        return

    def in_this_process(self) -> AbstractContextManager[None]:
        """Context of a whole job in this process; restores functions of PyTorch that the engine's package replaces.

        The process may be the user's own, and train something else next.
        """
        return nullcontext()

    def check_proof(self, job: Job) -> None:
        """Raise UserError for a settled job of which one process's step is not known. `verify` asks for it."""
        return

    @abstractmethod
    def prepare(self, model: nn.Module, how: Preparation) -> Trainer:
        """Spread the model, then make the optimizer of the parameters that this rank holds.

        Every rank of a training calls it with the same weights: `training/fit.py` makes them with the recipe's seed,
        or, where `can_fill` says so, leaves the model on the meta device with its values to come. What samestep
        spreads (`spread_as` in `engines/setup.py`) takes the same step by itself; an engine whose package spreads the
        model does what follows, in this order:

        - `keep_no_cache` (`parallel/exact/buffers.py`): forwards keep nothing from one sample to the next.
        - One `ForwardContext` a model (`parallel/exact/forward_context.py`): which samples a forward works on.
        - `same_dropout` (`parallel/exact/dropout.py`): random numbers of a forward belong to samples, not ranks.
        - `global_batch_norm` (`parallel/exact/batch_norm.py`) over `how.mesh.data_group`, with one rank as well: it
          refuses several micro-batches, whose statistics are not those of the batch.
        - An `UnusedParameters` (`parallel/unused_parameters.py`): parameters that no rank
          used have no gradient. An engine that sends gradients itself sends them in its `settle`.
        - `spread_by_engine` (`engines/setup.py`) of the model, what the package made of it, that context and that
          `UnusedParameters`; it stands in the `TrainerSetup` of a `NativeTrainer`, which weighs, clips and steps.
        """
