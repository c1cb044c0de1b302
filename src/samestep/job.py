"""Job: a recipe and how it is run. The `recipe:` and `run:` sections of a job file."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field
from pydantic.dataclasses import dataclass

from samestep.recipe import STRICT, Positive, Recipe, Whole

TensorRole = Literal["column", "row", "vocabulary", "whole"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpointing:
    """When a training's state is saved, where, and which of it the training begins with."""

    # A number of steps, or a time such as "30s", "10m", "2h"; None: after the last step alone.
    every: Positive | Annotated[str, Field(pattern=r"^\d+(\.\d+)?[smh]$")] | None = None
    keep: Positive = 3  # the last so many stay
    best: str | None = None  # a metric of the evaluations; the checkpoint with its best value stays as well
    best_is: Literal["highest", "lowest"] = "highest"
    folder: Path | None = None  # None: checkpoints/ in the run's folder
    asynchronous: bool = True  # the step waits for a copy in memory, not for the disk
    resume: str = "never"  # auto: go on from the last one in the folder, if any; a path: from that one


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Run:
    """How a recipe is run; nothing in here changes the result."""

    layout: str = "single"
    processes: Positive | None = None  # None: as many as the layout's sizes say
    engine: Any = "native"  # the name of a shipped engine, or an engine object
    engine_config: Path | None = None  # the engine's own configuration file, for engines that have one
    micro_batch: Positive | None = None  # samples of one forward on one rank; None: the whole slice
    cut_at: tuple[str, ...] | None = None  # layers with which pipeline stages begin, but the first; None: found
    device: Literal["auto", "cpu"] = "auto"  # auto: the accelerator where there is one
    threads: Positive | None = None  # a process; None: cores / local ranks
    workers: Annotated[Whole, Ge(0)] = 0  # processes that load data, a rank
    compile: bool = False  # torch.compile for each block
    tensor_plan: Mapping[str, TensorRole] | None = None  # layers that tensor parallel slices otherwise than it finds
    folder: Path | None = None  # None: runs/<name of the job file>
    offload_folder: Path | None = None  # for layouts that offload to disk; None: the system's temporary folder
    checkpoint: Checkpointing | None = None
    tensorboard: bool = True
    rank_lines: bool = False  # a line a rank: steps x samples x ranks = data set


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Job:
    """A recipe and how it is run."""

    recipe: Recipe
    run: Run = field(default_factory=Run)
    name: str | None = None  # of the run's folder; None: the job file's name, or the task's
