"""Timeline: the times of each rank's actions in one step of a pipeline, measured and ideal."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from samestep.layout import Layout
from samestep.parallel.pipeline.schedule import SCHEDULES, Action, Orders


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """An action, with its start and end in seconds."""

    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


class Timeline:
    """Records the actions of one step on this rank; other steps are not measured."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device) -> None:
        self.step: int | None = None  # the one to record
        self._layout = layout
        self._group = group
        self._device = device
        self._recording = False
        self._origin = 0.0
        self._spans: list[TimelineSpan] = []
        self._orders: Orders = ()

    @contextmanager
    def of_step(self, step: int, orders: Orders) -> Iterator[None]:
        """Context of a step, whose actions are recorded if it is the step to record."""
        self._recording = step == self.step
        if self._recording:
            self._orders, self._spans = orders, []
            # Clocks of different hosts have different origins, so times are relative to this barrier.
            dist.barrier(self._group)
            self._origin = time.perf_counter()
        yield
        self._recording = False

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Measure an action, from the arrival of its messages to the end of its computation."""
        if not self._recording:
            yield
            return
        began = self._now()
        yield
        self._spans.append(TimelineSpan(**vars(action), start=began, end=self._now()))

    def _now(self) -> float:
        """The time in seconds, after the device has finished all queued work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def gathered(self) -> dict[str, Any] | None:
        """Gather the recorded step of this pipeline's ranks as JSON; None if there is none. Every rank must ask."""
        if self.step is None or not self._orders:
            return None
        of_ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(of_ranks, (socket.gethostname(), self._origin, self._spans), group=self._group)
        spans = _on_one_clock(of_ranks)
        count = 1 + max(span.micro_batch for rank in spans for span in rank)
        ideal = ideal_times(self._orders)
        return {
            "layout": str(self._layout),
            "schedule": self._layout.schedule,
            "step": self.step,
            "micro_batches": count,
            "stages": self._layout.pipeline * self._layout.stages_a_rank,
            "bubble": {
                "measured": bubble(spans),
                "ideal": bubble(ideal),
                "formula": bubble_formula(self._layout, count),
            },
            "ranks": _as_json(spans),
            "ideal_ranks": _as_json(ideal),
        }


def _on_one_clock(of_ranks: Sequence[tuple[str, float, list[TimelineSpan]]]) -> list[list[TimelineSpan]]:
    """Every rank's spans, relative to the time at which the first rank of its host left the barrier.

    Ranks of one host read the same clock, and leave a barrier with up to milliseconds between them.
    """
    origins: dict[str, float] = {}
    for host, origin, _ in of_ranks:
        origins[host] = min(origin, origins.get(host, origin))
    return [
        [replace(span, start=span.start - origins[host], end=span.end - origins[host]) for span in spans]
        for host, _, spans in of_ranks
    ]


def _as_json(ranks: Sequence[Sequence[TimelineSpan]]) -> list[list[dict[str, Any]]]:
    """Convert spans to JSON, with times relative to the first start."""
    first = min(span.start for rank in ranks for span in rank)
    return [
        [{**asdict(span), "start": span.start - first, "end": span.end - first} for span in rank] for rank in ranks
    ]


def bubble(ranks: Sequence[Sequence[TimelineSpan]]) -> float:
    """The idle fraction of all ranks' time, from the start of the first action to the end of the last."""
    spans = [span for rank in ranks for span in rank]
    total = (max(span.end for span in spans) - min(span.start for span in spans)) * len(ranks)
    return 1 - sum(span.end - span.start for span in spans) / total


def bubble_formula(layout: Layout, micro_batches: int) -> float:
    """The idle fraction according to the schedules' papers, for p ranks, v stages a rank and m micro-batches.

    GPipe and 1F1B: (p - 1) / (m + p - 1) (Huang et al. 2019; Narayanan et al. 2021, section 2.2.1). Interleaved:
    (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2.2). Zero bubble: gradients of weights, a third of
    the work, fill what they can, which leaves (p - 1) / (3 v m + p - 1), where m is 2 p - 1 or more for ZBV. Qi et
    al. (2023) count it as none, since they count each rank from its own first action to its own last.

    One micro-batch is in one stage at a time under any of them: (p - 1) / p.
    """
    waiting, work = layout.pipeline - 1, layout.stages_a_rank * micro_batches
    if micro_batches == 1:
        return waiting / layout.pipeline
    if SCHEDULES[layout.schedule].splits_backward:
        work *= 3
    return waiting / (work + waiting)


# Forward and both halves of backward take equally long for matrix products.
_UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def ideal_times(orders: Orders, units: Mapping[str, float] = _UNITS) -> list[list[TimelineSpan]]:
    """Simulate the actions with messages that take no time and stages of equal length.

    Raises ValueError if the ranks would deadlock.
    """
    last_stage = max(action.stage for rank in orders for action in rank)
    done: dict[tuple[int, str, int], float] = {}
    times: list[list[TimelineSpan]] = [[] for _ in orders]
    clocks = [0.0] * len(orders)
    left = sum(len(rank) for rank in orders)
    # In each round every rank runs its actions up to the first whose dependencies are not done.
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while len(times[rank]) < len(actions):
                action = actions[len(times[rank])]
                needed = _needed(action, last_stage)
                if any(need not in done for need in needed):
                    break
                start = max([clocks[rank], *(done[need] for need in needed)])
                clocks[rank] = start + units[action.kind]
                times[rank].append(TimelineSpan(**vars(action), start=start, end=clocks[rank]))
                # Other stages only wait for the input's gradient.
                half = "B" if action.kind == "I" else action.kind
                done[action.stage, half, action.micro_batch] = clocks[rank]
                left -= 1
        if left == before:
            raise ValueError("the ranks wait for each other")
    return times


def _needed(action: Action, last_stage: int) -> list[tuple[int, str, int]]:
    """The dependencies of an action: (stage, half, micro-batch)."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage - 1, "F", micro_batch)] if stage else []
    if action.kind == "W":
        return [(stage, "B", micro_batch)]
    own = (stage, "F", micro_batch)
    return [own] if stage == last_stage else [own, (stage + 1, "B", micro_batch)]
