"""Memory and time of a step of a layout, from what its rehearsed ranks held, computed and sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.job import Job
from samestep.job_plan.machine import CAUSES, COMPUTE, Rates, TargetMachine
from samestep.launch.affinity import threads_of
from samestep.layout import MESH_AXES, Layout
from samestep.planning import collectives, pipeline_events
from samestep.planning.collectives import RankGroup
from samestep.planning.hardware import ClusterSpec
from samestep.planning.operators import Operator, work_of
from samestep.planning.pipeline_events import StageTimes
from samestep.planning.software import SOFTWARE
from samestep.planning.stage_time import CONTENTION, data_group
from samestep.run_folder import PLAN_FILE
from samestep.training.rehearsal import Collectives, Rehearsal
from samestep.training.usage import Usage

_FORWARD = 1 / 3  # of a step's FLOPs; backward computes two products for each of the forward's
_BEHIND = ("replicate", "shard")  # axes whose communication overlaps with backward on devices


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time and memory of a layout's step."""

    layout: str
    micro_batch: int | None
    usage: Sequence[Usage]  # of the rehearsed ranks
    fits: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by cause

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda cause: self.parts[cause])

    @property
    def peak_bytes(self) -> int:
        return max(map(peak_of, self.usage))

    def to_json(self) -> dict[str, Any]:
        """Seconds of a step by cause, and bytes of each rank."""
        return {
            "layout": self.layout,
            "micro_batch": self.micro_batch,
            "fits": self.fits,
            "step_seconds": self.seconds,
            "seconds_by_cause": dict(self.parts),
            "bound": self.bound,
            "peak_bytes": self.peak_bytes,
            "usage_bytes": [usage.to_json() for usage in self.usage],
        }

    def write(self, folder: Path) -> None:
        """Save it into its run's folder, for `samestep doctor`."""
        (folder / PLAN_FILE).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


def slower_by(other: Prediction, best: Prediction) -> tuple[str, float]:
    """Return the cause with the largest excess over the best layout, and its seconds."""
    more = {cause: other.parts[cause] - best.parts[cause] for cause in best.parts}
    cause = max(more, key=lambda name: more[name])
    return cause, more[cause]


def peak_of(usage: Usage) -> int:
    """Return a rank's peak bytes in a step, summed over tensors."""
    return usage.parameters + usage.optimizer_state + usage.activations + usage.gathered_and_gradients


def predict(job: Job, layout: Layout, machine: TargetMachine, ranks: Sequence[Rehearsal]) -> Prediction:
    """Predict the step of a layout from rehearsals of its ranks, one for each pipeline stage or some."""
    usage = [rank.usage for rank in ranks]
    peak = max(map(peak_of, usage))
    held = peak * (layout.size if machine.cluster is None else 1)
    if machine.cluster is not None:
        parts = [_on_devices(job, layout, machine.cluster, rank) for rank in ranks]
    else:
        assert machine.rates is not None
        parts = [_on_cores(job, layout, machine, machine.rates, rank) for rank in ranks]
    return Prediction(
        layout=str(layout),
        micro_batch=job.run.micro_batch,
        usage=usage,
        fits=held <= machine.memory,
        parts=_together(job, layout, machine, _every_stage(layout, parts), ranks[0].micro_batches),
    )


def _on_cores(job: Job, layout: Layout, machine: TargetMachine, rates: Rates, rank: Rehearsal) -> dict[str, float]:
    """Return a rank's seconds of computation on its own threads, and of its messages."""
    threads = threads_of(layout.size, job.run.threads)
    waiting = max(1.0, layout.size / machine.cores)  # ranks that share a core delay each other's messages
    messages, bytes_sent = rates.sending(rank.collectives)
    return {
        **rates.computing(rank.work, threads),
        "messages": messages * waiting,
        "bytes sent": bytes_sent * waiting,
    }


def _on_devices(job: Job, layout: Layout, cluster: ClusterSpec, rank: Rehearsal) -> dict[str, float]:
    """Return a rank's seconds on its own device, and of the messages that don't overlap."""
    device, software = cluster.device, SOFTWARE["samestep"]
    operators = [
        Operator(name="product", matmul=(m, n, k, count * times), launches=0.0)
        for (m, n, k, count), times in rank.work.products.items()
    ]
    work = work_of(operators, device, software, job.recipe.precision)
    rate = device.flops[job.recipe.precision] * device.efficiency.matmul
    products = work.seconds + rank.work.other_flops / rate
    attention = rank.work.attention_flops / (0.5 * rate)  # typical efficiency of its kernels
    passes = rank.work.bytes / (device.bandwidth * device.efficiency.bandwidth)
    host = max(rank.work.operators * device.efficiency.launch_seconds - products - attention - passes, 0.0)
    exposed = behind = 0.0
    for collective in rank.collectives:
        seconds = _message_seconds(layout, cluster, collective)
        if set(collective.axis.split("+")) <= set(_BEHIND):
            behind += seconds
        else:
            exposed += seconds
    hidden = min(behind, (1 - _FORWARD) * (products + attention + passes))
    traffic = exposed + behind - hidden + CONTENTION * hidden
    return dict(zip(CAUSES, (products, attention, passes, host, 0.0, 0.0, traffic), strict=True))


def _message_seconds(layout: Layout, cluster: ClusterSpec, collective: Collectives) -> float:
    """Return the seconds of one kind of message in a step, on the links of its group.

    The rehearsal gives what a rank sends; `sent * part` is the whole message again, since a rank sends (n - 1) / n of
    it (of an all-reduce twice that).
    """
    axes = [axis for axis in collective.axis.split("+") if axis in MESH_AXES]
    group = data_group(layout, axes) if axes else RankGroup(size=collective.ranks, stride=1)
    if group.size < 2:
        return 0.0
    sent, part = collective.sent / collective.count, group.size / (group.size - 1)
    one = {
        "all-reduce": lambda: collectives.all_reduce(sent * part / 2, group, cluster),
        "point-to-point": lambda: collectives.send(sent, group, cluster),
        "all-to-all": lambda: collectives.all_to_all(sent * part, group, cluster),
    }.get(collective.kind, lambda: collectives.all_gather(sent * part, group, cluster))()
    return collective.count * one


def _every_stage(layout: Layout, parts: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the parts of each pipeline rank; one that was not rehearsed has those of the nearest."""
    last, last_part = layout.pipeline - 1, len(parts) - 1
    return [parts[round(stage * last_part / last)] if last else parts[0] for stage in range(layout.pipeline)]


def _together(
    job: Job, layout: Layout, machine: TargetMachine, stages: Sequence[Mapping[str, float]], micro_batches: int
) -> dict[str, float]:
    """Combine the stages to a step's seconds by cause: simulate the pipeline, and share cores among ranks."""
    compute = [sum(parts[cause] for cause in COMPUTE) for parts in stages]
    worst = dict(stages[max(range(len(stages)), key=lambda stage: sum(stages[stage].values()))])
    busiest = elapsed = max(compute)
    if layout.pipeline > 1:
        elapsed = _played(layout, compute, micro_batches)
    if machine.cluster is None:
        # At least the work of all ranks divided among the cores.
        threads = threads_of(layout.size, job.run.threads)
        whole = sum(compute) * (layout.size / layout.pipeline) * threads
        elapsed = max(elapsed, whole / machine.cores)
    scale = elapsed / busiest if busiest else 1.0
    return {cause: seconds * (scale if cause in COMPUTE else 1.0) for cause, seconds in worst.items()}


def _played(layout: Layout, compute: Sequence[float], number: int) -> float:
    """Simulate the pipeline's schedule with each rank's computation; return the seconds of a step."""
    owners = pipeline_events.owners(layout.schedule, layout.pipeline, layout.stages_a_rank)
    own_seconds = [compute[rank] / number / layout.stages_a_rank for rank in owners]
    stages = [
        StageTimes(forward=_FORWARD * seconds, backward=(1 - _FORWARD) * seconds, weights=_FORWARD * seconds)
        for seconds in own_seconds
    ]
    return pipeline_events.elapsed(layout, stages, number)
