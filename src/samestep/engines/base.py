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
from samestep.communication import Communication
from samestep.data.loader import StepBatch
from samestep.data.order import Place
from samestep.job import Job
from samestep.layout import Layout
from samestep.parallel.holdings import Holdings
from samestep.parallel.parallel_model import Details
from samestep.parallel.pipeline.timeline import Timeline
from samestep.parallel.sharding import Entry
from samestep.parallel.state_shards import Piece
from samestep.profiling.clock import StepClock
from samestep.recipe import Average
from samestep.tasks.base import Batch, Task
from samestep.tasks.turns import StepTurns

# The loss summed over a batch's terms, and how many terms those are.
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | int]]
OptimizerOf = Callable[[Iterator[tuple[str, nn.Parameter]]], Optimizer]
ScheduleOf = Callable[[Optimizer], LRScheduler | None]


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an engine can do. A job that asks for more is refused before any process starts."""

    dimensions: frozenset[str]  # mesh dimensions that it can split
    precisions: frozenset[str]
    recompute: frozenset[str] = frozenset({"none"})
    offload: frozenset[str] = frozenset({"none"})
    attention: frozenset[str] = frozenset({"ulysses"})  # of tokens that are split
    config: str | None = None  # what its own configuration file is called, where it takes one
    packages: Mapping[str, str] = field(default_factory=dict)  # module that it needs -> what installs it
    checkpoints: bool = False  # whether its trainers are Checkpointed
    complex_parameters: bool = False  # whether its trainers keep complex parameters complex
    same_step: bool = True  # False: asynchronous or approximate, and measured by what it reaches

    profiles: bool = False  # run.profile: whether its trainers tell a clock of their phases
    buckets: bool = False  # run.bucket_mb: replicas send their gradients in buckets of that size
    shared_memory: bool = False  # whether run.transport reaches its messages: they go through torch.distributed
    sparse_rows: bool = False  # run.sparse_rows
    shares_replicas: bool = False  # run.share_replicas
    ordered: bool = False  # run.reduction: ordered
    skips: bool = False  # whether its trainers are Skipping
    batch_buffers: bool = False  # a task's buffers that are a mean or a sum over the batch
    compiles: bool = False  # run.compile: torch.compile for each block
    chunks_loss: bool = False  # run.loss_chunk: output layer and cross-entropy in chunks
    float32_matmul: bool = True  # run.float32_matmul: whether its products are PyTorch's
    sends_less: bool = False  # recipe.communication
    adapters: bool = False  # recipe.adapter: layers with further parameters inside, beside frozen ones
    own_optimizers: bool = False  # optimizers by name, and groups of parameters with settings of their own
    averages: bool = False  # recipe.average
    master_weights: bool = False  # recipe.master_weights
    attention_dropout: bool = False  # whether recipe.attention_dropout may be false
    several_losses: bool = False  # losses of several terms, each with its own count
    turns: bool = False  # steps in turns, each with its own loss and parameters
    gathers: bool = False  # a task's loss that couples samples, by `gather`


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step did, seen over all ranks. Tensors, so that nothing waits for an accelerator."""

    loss: Tensor  # sum over the global batch / global count
    grad_norm: Tensor  # before clipping
    lr: float
    terms: Mapping[str, Tensor] = field(default_factory=dict)  # the loss's parts by name, where it has some
    sent: int | None = None  # bytes that this rank sent in the step, where they are counted in every step


class Trainer(ABC):
    """A model and its optimizer on one rank, spread as the layout says."""

    timeline: Timeline | None = None  # where a pipeline writes down what it did in one step
    free_running: bool = False  # ranks don't wait for each other in every step
    clock: StepClock | None = None  # to which the phases of a step are reported, where steps are profiled

    @abstractmethod
    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Forward, backward, clip, update, advance the schedule: one step of the global batch."""

    def settle(self) -> None:
        """Wait until this rank has its parameters as the last step left them; what reads them here does by itself."""
        return

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The model's output in evaluation mode, without gradients; None where other ranks have it."""

    def averaged(self) -> AbstractContextManager[None]:
        """Meanwhile the model has the average of its weights for weights, where one is kept; every rank enters."""
        return nullcontext()

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by its name in the model; the same on every rank."""

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter, key and values of the optimizer's state of each parameter, whole, as far as it can be read.

        `keys`: those that may be there, of the parameter's shape. Every rank asks.
        """
        yield from ()

    @abstractmethod
    def holdings(self) -> Holdings:
        """What this rank holds when a step is over."""

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank sends in one step by other ways than torch.distributed, by kind of collective."""
        return {}

    def measured(self) -> Mapping[str, Any]:
        """What the engine has measured of its own, for the report; rank 0's counts."""
        return {}

    def elsewhere_seconds(self) -> float:
        """The processor's time that other processes have computed in for this rank so far."""
        return 0.0

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers, on the CPU."""

    def state_to_write(self, *, kept: bool) -> dict[str, Tensor]:
        """`state` on a rank that wants to have it, and nothing on the others; every rank must ask."""
        state = self.state()
        return state if kept else {}


class TurnTaking(Trainer):
    """A trainer whose steps can have turns."""

    @abstractmethod
    def step_in_turns(self, batch: StepBatch, turns: StepTurns) -> StepReport:
        """A step of several losses, each of which steps its own parameters before the next forward."""


class Skipping(Trainer):
    """A trainer that can leave a step out."""

    skips_nonfinite: bool = False  # a step whose loss or gradient norm isn't finite changes nothing but the schedule

    @abstractmethod
    def pass_over(self) -> float:
        """Advance the schedule as a step would, and nothing else; return the step's learning rate."""


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
        """Further names of parameters that have several -> the name under which they are saved."""

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """What this rank holds of the model and of the optimizer's state; every rank asks."""

    @abstractmethod
    def scaler_state(self) -> dict[str, float]:
        """What scales the loss under fp16; the same on every rank."""

    @abstractmethod
    def restore(
        self,
        step: int,
        saved: Mapping[str, Entry],
        read: Callable[[Mapping[str, Piece]], None],
        scaler: Mapping[str, float],
    ) -> None:
        """Become what was saved after `step` steps. `read` fills pieces in place; every rank calls it once."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a model is spread on this rank, and what its trainer steps with."""

    layout: Layout
    mesh: Mesh
    device: torch.device
    precision: str
    clip: float | None  # the largest norm of the whole gradient
    optimizer_of: OptimizerOf  # from the parameters that this rank then holds
    schedule_of: ScheduleOf
    details: Details
    average: Average | None = None  # of the weights, which is evaluated and exported; None: there is none
    communication: Communication | None = None  # how less is sent than every step's gradient; None: it isn't
    master_weights: bool = False  # whether the optimizer steps a copy of the parameters with more digits


class Engine(ABC):
    """Makes a Trainer of a model."""

    name: ClassVar[str]
    abilities: ClassVar[Abilities]

    def can_fill(self, layout: Layout) -> bool:
        """Whether `prepare` takes a model on the meta device under this layout, with its initial values to come."""
        return False

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        """Raise UserError for a task that this engine can't train so. It is called before any process starts."""
        return

    def training_place(self, place: Place, layout: Layout, rank: int, config: Path | None) -> Place:
        """Which part of each global batch a rank trains on; `place` is its part where all data ranks share it out."""
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
        """Build what a settled job takes of the engine and isn't there yet: the last of the checks.

        Called before any process starts, or by each rank where a launcher started them. Raises UserError where it
        can't be built.
        """
        return

    def in_this_process(self) -> AbstractContextManager[None]:
        """Around all that this process does of a job, which may be the user's own and train something else next.

        What its package puts in the place of PyTorch's functions is put back there.
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
        - `global_batch_norm` (`parallel/exact/batch_norm.py`) over `how.mesh.data_group`, where ranks share a batch.
        - A `Used` (`parallel/unused_parameters.py`): parameters that no rank
          used have no gradient. An engine that sends gradients itself sends them in its `settle`.
        - `spread_by_engine` (`engines/setup.py`) of the model, what the package made of it, that context and that
          `Used`; it stands in the `TrainerSetup` of a `NativeTrainer`, which weighs, clips and steps.
        """
