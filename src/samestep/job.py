"""Job: a recipe and how it is run. The `recipe:` and `run:` sections of a job file."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from samestep.durations import EXAMPLES, PATTERN, PATTERN_WITH_UNIT, has_unit, parse_duration, wanted
from samestep.field_types import STRICT, Count, FilePath, PathText, Positive, Ranks, Real, Whole
from samestep.limits import (
    LEAST_PATIENCE,
    LEAST_SECONDS,
    MOST,
    MOST_RANKS,
    MOST_RESTARTS,
    MOST_SECONDS,
    MOST_THREADS,
    MOST_WORKERS,
)
from samestep.ranks import DeviceChoice, Transport
from samestep.recipe import Recipe
from samestep.validation import tells_mistakes

TensorRole = Literal["column", "row", "vocabulary", "whole"]
ExpertRole = Literal["split", "whole"]


def _seconds_from(least: float) -> BeforeValidator:
    """Read a time of at least so long as seconds: 90, or text such as 90s, 1.5m, 2h."""

    def seconds(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            return value
        duration = parse_duration(value, least)
        if duration is None:
            raise PydanticCustomError("duration_wanted", "Input should be {wanted}", {"wanted": wanted(least)})
        return duration

    number = Annotated[float, Field(ge=least, le=MOST_SECONDS)]
    return BeforeValidator(seconds, json_schema_input_type=number | Annotated[str, Field(pattern=PATTERN)])


def _interval(value: Any) -> str:
    """A time with its unit, as text."""
    if not isinstance(value, str) or parse_duration(value) is None or not has_unit(value):
        raise PydanticCustomError("duration_wanted", "Input should be {examples}", {"examples": EXAMPLES})
    return value


Interval = Annotated[
    str, BeforeValidator(_interval, json_schema_input_type=Annotated[str, Field(pattern=PATTERN_WITH_UNIT)])
]
Duration = Annotated[Real, Gt(0), Le(MOST_SECONDS), _seconds_from(LEAST_SECONDS)]
_Patience = Annotated[Real, Gt(0), Le(MOST_SECONDS), _seconds_from(LEAST_PATIENCE)]
Fault = Literal["kill", "raise", "hang", "oom", "nan", "slow", "deadlock", "abort"]


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Inject:
    """A fault that a rank commits in a step, for tests and drills."""

    rank: Annotated[Whole, Ge(0), Lt(MOST_RANKS)]
    step: Count  # counted from 0, as in metrics.jsonl
    fault: Fault
    seconds: Duration = 0.1  # slow: how much longer this step and every later one takes
    every_round: bool = False  # also when the ranks have been started again
    # A file: the fault is committed in the first step from `step` on that finds it, in whatever round, and takes the
    # file away. For faults that come from outside.
    when: FilePath | None = None


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, (Mapping, Inject)) else value


def _which_checkpoint(value: Any) -> Any:
    """Refuse true and false, which YAML makes of yes and no, and what else is no text."""
    if not isinstance(value, (str, Path)):
        raise PydanticCustomError(
            "checkpoint_wanted", "Input should be never, auto, last, or the path of a checkpoint (last: the newest)"
        )
    return str(value)


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpointing:
    """When a training's state is saved, where, and which of it the training begins with."""

    # A number of steps, or a time such as "30s", "10m", "2h"; None: after the last step alone.
    every: Positive | Interval | None = None
    keep: Positive = 3  # the last so many stay
    best: str | None = None  # a metric of the evaluations; the checkpoint with its best value stays as well
    best_is: Literal["highest", "lowest"] = "highest"
    folder: FilePath | None = None  # None: checkpoints/ in the run's folder
    fallback_folder: FilePath | None = None  # for those that can't be written into `folder`
    # Saves that may fail in a row, each tried several times, before the training ends.
    max_failures: Annotated[Whole, Ge(0), Le(1000)] = 5
    asynchronous: bool = True  # the step waits for a copy in memory, not for the disk
    memory: Positive | None = None  # steps between copies in the host's memory, from which restarts go on
    # Frozen parameters are left out, and built again when it is read; None: where the model has adapters.
    only_trained: bool | None = None
    # auto: go on from the last one in the folder, if any; last: from that, refused where there is none; a path: from
    # that one.
    resume: Annotated[PathText, BeforeValidator(_which_checkpoint)] = "never"
    accept_data: bool = False  # go on with other data than those of the checkpoint


def _section_if_true(value: Any) -> Any:
    """`true` as a section of defaults, and `false` as none."""
    if isinstance(value, bool):
        return {} if value else None
    if value is not None and not isinstance(value, (Mapping, Profiling)):
        raise PydanticCustomError(
            "section_wanted", "Input should be true, or a section such as {example}", {"example": "{steps: 5}"}
        )
    return value


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profiling:
    """Which steps of a training are profiled on every rank, and where the profile goes."""

    folder: FilePath | None = None  # None: profile/ in the run's folder
    # Steps before. In the third one bytes are counted, which takes long, and in the fourth the profiler warms up.
    warm_up: Annotated[Whole, Ge(4), Le(MOST)] = 4
    steps: Annotated[Whole, Gt(0), Le(1000)] = 5


def _on_or_off(value: Any) -> Any:
    """YAML reads on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Log:
    """A service that the numbers of each step are sent to while a training runs."""

    kind: str  # the name of a shipped logger, or of one of another package
    project: str | None = None  # what the service calls a collection of runs; None: samestep
    name: str | None = None  # of the run there; None: the job's
    args: dict[str, Any] = field(default_factory=dict)  # what the service's own function to begin a run takes


def _loggers(value: Any) -> Any:
    """A name alone, or names and sections in a list."""
    if isinstance(value, (str, Mapping, Log)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return [{"kind": entry} if isinstance(entry, str) else entry for entry in value]


def _name_or_names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Loggers = str | tuple[str | Log, ...]


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Run:
    """How a recipe is run; nothing in here changes the result."""

    layout: str = "single"
    processes: Ranks | None = None  # None: as many as the layout's sizes say
    engine: Any = "native"  # the name of a shipped engine, or an engine object
    engine_config: FilePath | None = None  # the engine's own configuration file, for engines that have one
    micro_batch: Positive | None = None  # samples of one forward on one rank; None: the whole slice
    # How gradients are summed. ordered: over the recipe's virtual ranks in one fixed tree, to the same bits under
    # every layout that has it.
    reduction: Literal["fast", "ordered"] = "fast"
    group_by_length: bool = False  # a rank's micro-batches are of samples of like length
    cut_at: tuple[str, ...] | None = None  # layers with which pipeline stages begin, but the first; None: found
    device: DeviceChoice = "auto"  # auto: the accelerator where there is one
    # Of messages between ranks on CPUs; auto: shared memory where ranks share a host, and gloo between hosts. On
    # accelerators gloo goes through the host's memory, and several ranks may share one.
    transport: Transport = "auto"
    # Gradients of embeddings between replicas as the rows that a step touched, where that is fewer bytes; auto: of
    # tables of 1 MiB or more, on CPUs.
    sparse_rows: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_on_or_off, json_schema_input_type=Literal["auto", "on", "off"] | bool),
    ] = "auto"
    # The replicas of one host keep one copy of parameters and optimizer state, and each steps its part.
    share_replicas: bool = False
    threads: Annotated[Whole, Gt(0), Le(MOST_THREADS)] | None = None  # a process; None: cores / local ranks
    # Cores on which each rank of this machine runs: its own, all of a NUMA node, or any; auto: its own, where there
    # are as many as ranks.
    bind: Literal["auto", "none", "cores", "numa"] = "auto"
    workers: Annotated[Whole, Ge(0), Le(MOST_WORKERS)] = 0  # processes that load data, a rank
    # Where a step's time goes.
    profile: Annotated[
        Profiling | None, BeforeValidator(_section_if_true, json_schema_input_type=Profiling | bool | None)
    ] = None
    check: bool = True  # the task's contract, in one process before any rank starts
    compile: bool = False  # torch.compile for each block
    # Digits of float32 matrix products: highest: all; high: TensorFloat-32 or two bfloat16; medium: bfloat16.
    float32_matmul: Literal["highest", "high", "medium"] = "highest"
    # Tokens whose logits stand at once: output layer and cross-entropy in chunks; None: those of a micro-batch.
    loss_chunk: Positive | None = None
    bucket_mb: Annotated[Real, Gt(0), Le(65536)] | None = None  # MiB that replicas send at once; None: `parallel.ddp`
    tensor_plan: Mapping[str, TensorRole] | None = None  # layers that tensor parallel slices otherwise than it finds
    expert_plan: Mapping[str, ExpertRole] | None = None  # modules that are experts, or none, otherwise than is found
    folder: FilePath | None = None  # None: runs/<name of the job file>
    overwrite: bool = False  # remove an earlier run in the folder, with its checkpoints
    offload_folder: FilePath | None = None  # for layouts that offload to disk; None: the system's temporary folder
    checkpoint: Checkpointing | None = None
    # Services that get the numbers of each step; None: TensorBoard where it is installed.
    log: Annotated[tuple[Log, ...], BeforeValidator(_loggers, json_schema_input_type=Loggers)] | None = None
    hooks: Annotated[
        tuple[str, ...], BeforeValidator(_name_or_names, json_schema_input_type=str | tuple[str, ...])
    ] = ()  # "file.py:Class" of samestep.Hooks, which are told of each step
    rank_lines: bool = False  # a line a rank: steps x samples x ranks = data set
    max_restarts: Annotated[Whole, Ge(0), Le(MOST_RESTARTS)] = (
        0  # times that all ranks are started again after one has failed
    )
    hang_limit: _Patience | None = 60.0  # seconds without progress of any rank; None: ranks may wait for ever
    grace_period: _Patience = 30.0  # seconds from SIGTERM or Ctrl-C until the ranks must have saved and ended
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # a loss or gradient norm that is NaN or infinite
    elastic: bool = False  # go on with fewer data ranks when a rank is lost for good
    min_processes: Ranks = 1  # fewest that elastic goes on with
    # Faults to commit.
    inject: Annotated[
        tuple[Inject, ...], BeforeValidator(_one_or_more, json_schema_input_type=tuple[Inject, ...] | Inject)
    ] = ()


_LONGEST_NAME = 240  # bytes, which leaves room for the number of a further run


def _is_folder_name(text: str) -> bool:
    """Whether one folder can be called so."""
    short = len(text.encode("utf-8", "replace")) <= _LONGEST_NAME
    return short and text.isprintable() and "/" not in text and text.strip() not in ("", ".", "..")


def _name(text: str) -> str:
    """A name that a folder can have."""
    if not _is_folder_name(text):
        raise PydanticCustomError(
            "folder_name",
            "Input should be the name of one folder, without / and of at most {most} bytes",
            {"most": _LONGEST_NAME},
        )
    return text


def _no_file(value: Any) -> Any:
    """Refuse the path of a job file, which `samestep.train` and others don't read."""
    if isinstance(value, (str, Path)):
        raise PydanticCustomError(
            "recipe_wanted",
            "Input should be a section of keys and values, in Python a samestep.Recipe (samestep.jobfile.load reads "
            "a job file)",
        )
    return value


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Job:
    """A recipe and how it is run."""

    recipe: Annotated[Recipe, BeforeValidator(_no_file)]
    run: Run = field(default_factory=Run)
    name: Annotated[str, AfterValidator(_name)] | None = (
        None  # of the run's folder; None: the job file's name, or the task's
    )
