"""The result of a training: `TrainResult`, and the files in the run's folder."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from samestep import file_errors
from samestep.checkpoint.attempts import PAUSES
from samestep.errors import NotSavedError, UserError
from samestep.fault_tolerance.lease import Held
from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.fault_tolerance.pace import lagging
from samestep.job import Job
from samestep.launch.device import peak_memory
from samestep.profiling.breakdown import Profile
from samestep.run_folder import CURVES_FILE, MODEL_FILE, REPORT_FILE, SCHEDULE_FILE, RunPlace, versions
from samestep.training.metrics_log import SKIPPED
from samestep.training.session import Session
from samestep.training.usage import Usage


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a finished training. `metrics` are of the held-out samples after the last step."""

    metrics: Mapping[str, Any]
    losses: tuple[float, ...]  # one per step; if the records of earlier steps are missing, from `first_step` on
    final_terms: Mapping[str, float] = field(default_factory=dict)  # the last loss's terms by name, if it has several
    first_step: int = 0  # above 0 if it was resumed from a checkpoint
    steps: int
    stopped_early: str | None = None  # the reason, if recipe.early_stop ended it
    seconds: float  # of all steps, without start-up, evaluation and checkpoints
    evaluation_seconds: float = 0.0  # of all evaluations
    checkpoint_seconds: float = 0.0  # for which checkpoints blocked the training
    checkpoints_skipped: int = 0  # saves that were left out, as the disk refused them
    samples_per_second: float
    speeds: Mapping[str, float]  # tokens and FLOPs per second, if the task gives the work of a sample
    folder: Path
    usage: Sequence[Usage] = ()  # of each rank, in one step
    sent_bytes: int | None = None  # by one rank in all steps since `first_step`, with recipe.communication
    own_step_seconds: Sequence[float] = ()  # median per rank, without waiting for other ranks
    profile: Profile | None = None  # with run.profile

    @property
    def model_file(self) -> Path:
        """The trained model's weights, as safetensors."""
        return self.folder / MODEL_FILE


def check_folder(folder: Path | None, key: str = "run.folder") -> None:
    """Raise UserError where a file stands in the way of a folder that a key of the job names."""
    if folder is None:
        return
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not there.is_dir():
        raise UserError(f"{key} is {folder}: {there} is a file; use a folder, or a new path")


def folder_of(job: Job) -> Path:
    """The run's folder, the same on every rank."""
    return agreed(RunPlace.of(job).chosen())


def agreed(value: Any) -> Any:
    """Broadcast rank 0's value."""
    chosen = [value]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def gather_own_step_seconds(seconds: float) -> list[float]:
    """All-gather each rank's seconds per step without waiting for others, in rank order."""
    ranks: list[Any] = [0.0] * dist.get_world_size()
    dist.all_gather_object(ranks, seconds)
    return ranks


def gather_peak_memory(session: Session) -> list[int]:
    """All-gather the peak memory of every rank in bytes, in rank order."""
    peaks: list[Any] = [None] * session.world.world_size
    dist.all_gather_object(peaks, peak_memory(session.world.device))
    return peaks


def write(
    result: TrainResult,
    session: Session,
    *,
    peaks: list[int],
    state: dict[str, Tensor],
    schedule: Any,
    held: Held | None,
) -> None:
    """Write the model's weights, a pipeline's schedule, the curves and report.json into the run's folder.

    The report comes last: it says that the run came to its end. `held`: the folder's lease. Raises LeaseLostError if
    it doesn't count any more, NotSavedError if a file can't be written.
    """
    size = sum(value.nbytes for value in state.values())
    _kept(partial(write_weights, result.model_file, state), result.model_file, held, needs=size)
    if schedule is not None:
        _kept(partial(_write_json, result.folder / SCHEDULE_FILE, schedule), result.folder / SCHEDULE_FILE, held)
    report = partial(
        write_report,
        result,
        peaks=peaks,
        layout=str(session.layout),
        engine=session.engine.name,
        processes=session.world.world_size,
        threads=session.world.threads,
        device=session.world.device.type,
        measured=session.trainer.measured(),
    )
    _kept(report, result.folder / REPORT_FILE, held)


def _kept(write: Callable[[], None], file: Path, held: Held | None, *, needs: int | None = None) -> None:
    """Call a function that writes a file, and again if the system refuses it. Raises NotSavedError if it still does.

    `held`: the folder's lease, which is looked at before each try. `needs`: bytes of the file.
    """
    refused: OSError | None = None
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            if held is not None:
                held.check()
            file.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile
            write()
        except OSError as error:
            refused = error
        else:
            return
    assert refused is not None
    reason = file_errors.reason_of(refused, file.parent, elsewhere="use another run.folder", needs=needs)
    raise NotSavedError(
        f"the training came to its end, and {file} can't be written, in {1 + len(PAUSES)} tries: {reason}; started "
        "again with --resume, it is written from the last checkpoint, if there is one",
        at_end=True,
    )


def write_report(
    result: TrainResult,
    *,
    peaks: list[int],
    layout: str,
    engine: str,
    processes: int,
    threads: int,
    device: str,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write report.json, and the metrics that are curves into a file of their own."""
    report = {
        "metrics": {name: value for name, value in result.metrics.items() if not is_curve(value)},
        "final_loss": result.losses[-1] if result.losses else None,
        **({"final_losses": dict(result.final_terms)} if result.final_terms else {}),
        "first_step": result.first_step,
        "steps": result.steps,
        **({} if result.stopped_early is None else {"stopped_early": result.stopped_early}),
        "seconds": result.seconds,
        "evaluation_seconds": result.evaluation_seconds,
        "checkpoint_seconds": result.checkpoint_seconds,
        SKIPPED: result.checkpoints_skipped,
        "samples_per_second": result.samples_per_second,
        **result.speeds,
        "peak_memory_bytes": peaks,
        "own_step_seconds": list(result.own_step_seconds),
        "slow_ranks": lagging(result.own_step_seconds),
        **({} if result.sent_bytes is None else {"sent_bytes": result.sent_bytes}),
        "usage_bytes": [usage.to_json() for usage in result.usage],
        "layout": layout,
        "engine": engine,
        **({"engine_measured": dict(measured)} if measured else {}),
        "processes": processes,
        "threads": threads,
        "device": device,
        "versions": versions(),
    }
    _write_json(result.folder / REPORT_FILE, report)
    curves = {name: value for name, value in result.metrics.items() if is_curve(value)}
    if curves:
        _write_json(result.folder / CURVES_FILE, curves)


def is_curve(value: Any) -> bool:
    """Whether a metric is a curve, with a point per distinct score: too long for a report."""
    return isinstance(value, Mapping) and "thresholds" in value


def _write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(without_nonfinite(values), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_weights(complex: Sequence[str], precision: str) -> None:
    """Raise UserError where the weights file of a run can't hold the tensors of these names."""
    if complex and precision == "fp64":
        raise UserError(
            f"recipe.precision is fp64 and {complex[0]} of the model is complex, and {MODEL_FILE} has no complex128; "
            "use fp32, for whose complex64 it has a type"
        )


def write_weights(file: Path, state: Mapping[str, Tensor]) -> None:
    """Write a whole model's parameters and buffers as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors replaces the file by one with mode 0600; restore the mode of any new file.
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(_apart(state), file)
    except SafetensorError as error:  # the system's error is in its text alone
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from None
    file.chmod(mode)


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies in place of all but the first of those that share memory.

    safetensors refuses two names for one tensor; tied weights are written under each of theirs.
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        memory = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if memory in seen else value.contiguous()
        seen.add(memory)
    return tensors
