"""Options: the settings of a training that its step depends on, beside the model and the layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from samestep.communication import Communication
from samestep.job import Job
from samestep.recipe import Average, Precision


@dataclass(frozen=True, kw_only=True)
class OwnLoopOptions:
    """The options that a loop of one's own can give as well (`samestep.session`), with their defaults."""

    precision: Precision = "fp32"
    # Maximum norm of the whole gradient; None: it is not clipped.
    clip: float | None = None
    seed: int = 0
    micro_batch: int | None = None
    # Processes that load data, for each rank.
    workers: int = 0
    # How tensor parallel slices layers (name or pattern -> role), if that can't be found automatically.
    tensor_plan: Mapping[str, str] | None = None
    # Which modules are experts (name or pattern -> role), if that can't be found automatically.
    expert_plan: Mapping[str, str] | None = None
    # The first layer of each pipeline stage but the first; None: found automatically.
    cut_at: Sequence[str] | None = None
    # Whether each block is compiled by torch.compile.
    compile: bool = False
    # Rows of logits that the output layer and cross-entropy compute at a time; None: all.
    loss_chunk: int | None = None
    # Folder for offload to disk; None: the system's temporary folder.
    offload_folder: Path | None = None
    # The engine's own configuration file.
    engine_config: Path | None = None
    # Size of gradient buckets in MiB; None: DistributedDataParallel's default.
    bucket_mb: float | None = None
    # Whether replicas exchange gradients of embeddings as touched rows.
    sparse_rows: Literal["auto", "on", "off"] = "auto"
    # Moving average of the weights, which is evaluated and exported.
    average: Average | None = None


@dataclass(frozen=True, kw_only=True)
class Options(OwnLoopOptions):
    """All options, handed on whole from a job, or from a loop of one's own, to the code that uses one of them.

    A new option is a field here and a key of the same name in a job's `recipe` or `run`.
    """

    # The job's global batch size; None: a loop of one's own.
    batch: int | None = None
    # The method that replaces gradient averaging; None: averaging.
    communication: Communication | None = None
    # Whether the optimizer steps a copy of the parameters in higher precision.
    master_weights: bool = False
    # Whether attention applies its dropout.
    attention_dropout: bool = True
    # Whether the replicas of a host share one copy of parameters and optimizer state.
    share_replicas: bool = False
    # Number of virtual ranks, each with its own forward and backward, for sums of gradients in an order that does not
    # depend on the layout; None: gradients are summed by the back end.
    virtual_ranks: int | None = None
    # Whether broadcasts of updated parameters may be pending after a step. Then only the trainer may read the model
    # between steps.
    late_parameters: bool = False

    @classmethod
    def of(cls, job: Job) -> Self:
        """The options of a job, by the names of its keys."""
        keys: dict[str, Any] = {**vars(job.recipe), **vars(job.run)}
        values = {field.name: keys[field.name] for field in fields(cls) if field.name in keys}
        values["virtual_ranks"] = job.recipe.virtual_ranks if job.run.reduction == "ordered" else None
        return cls(**values, late_parameters=True)

    @classmethod
    def of_own_loop(cls, options: OwnLoopOptions) -> Self:
        """The options of a loop of one's own, with the defaults of those that only a job has."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(OwnLoopOptions)})
