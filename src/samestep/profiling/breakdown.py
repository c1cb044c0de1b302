"""Converts what the ranks' clocks recorded to categories that add up to a step, and finds the straggler."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from samestep.profiling.clock import Interval, StepTimes

# Parts of a step's wall time. Communication is the time waited for; overlapped communication is separate.
CATEGORIES = ("compute", "communication", "data", "optimizer", "other", "idle")
_WORK = {"forward": "compute", "backward": "compute", "optimizer": "optimizer"}

_HOLDS_UP = 0.1  # of a step: excess of the straggler's own work over the other ranks'
_MOSTLY = 0.8  # of the steps: minimum share in which it is the slowest


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Seconds of one rank's step: means over the profiled steps, unless noted."""

    rank: int
    seconds: float  # wall time, from asking for one step's data to asking for the next's
    own_seconds: float  # median, without waiting for messages
    categories: Mapping[str, float]  # by CATEGORIES; their sum is `seconds`
    overlapped: float  # communication that overlapped with the rank's work
    phases: Mapping[str, Mapping[str, float]]  # phase -> busy, idle, waited
    typical: Mapping[str, Mapping[str, float]]  # the same as medians, robust against interruptions
    own_steps: tuple[float, ...] = ()  # of each step, without waiting for messages

    def to_json(self) -> dict[str, Any]:
        """Milliseconds, and shares of the step."""
        shares = {name: seconds / self.seconds for name, seconds in self.categories.items()}
        milliseconds = {name: seconds * 1e3 for name, seconds in self.categories.items()}
        return {
            "rank": self.rank,
            "step_ms": self.seconds * 1e3,
            "own_ms": self.own_seconds * 1e3,
            "own_ms_of_each_step": [seconds * 1e3 for seconds in self.own_steps],
            "categories_ms": milliseconds,
            "categories_share": shares,
            "communication_overlapped_ms": self.overlapped * 1e3,
            "phases_ms": {
                name: {kind: seconds * 1e3 for kind, seconds in kinds.items()} for name, kinds in self.phases.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank whose own work delays the others."""

    rank: int
    own_seconds: float
    others_seconds: float  # median of the other ranks' own work
    phase: str  # with most of the difference
    kind: str  # busy: working; idle: not running


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Breakdown of a training's step time on every rank."""

    layout: str
    steps: tuple[int, ...]  # that were profiled, counted from 0
    ranks: tuple[RankProfile, ...]
    straggler: Straggler | None
    usual_seconds: float | None  # median of rank 0's unprofiled steps; None: there are none
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """All ranks' profiles, and who holds the others up."""
        return {
            "layout": self.layout,
            "steps": list(self.steps),
            "usual_step_ms": None if self.usual_seconds is None else self.usual_seconds * 1e3,
            "ranks": [rank.to_json() for rank in self.ranks],
            "straggler": None if self.straggler is None else asdict(self.straggler),
        }


def rank_profile(
    rank: int, steps: Sequence[StepTimes], *, ran: Sequence[Interval], unseen: Sequence[Interval] = (), idles: bool
) -> RankProfile:
    """Build a rank's profile from what its clock recorded in `steps`, one or more.

    `ran`: intervals in which collectives ran. `unseen`: waits in the rank's own thread that the clock did not record.
    `idles`: whether a thread without processor time is idle; it isn't where it waits for an accelerator.
    """
    by_step = [_one_step(step, unseen, idles=idles) for step in steps]
    phases: dict[str, dict[str, float]] = {}
    typical: dict[str, dict[str, float]] = {}
    for name in ("data", "forward", "backward", "optimizer", "other"):
        of_phase = [step.get(name, {}) for step in by_step]
        by_kind = {kind: [one.get(kind, 0.0) for one in of_phase] for kind in ("busy", "idle", "waited")}
        phases[name] = {kind: fmean(seconds) for kind, seconds in by_kind.items()}
        typical[name] = {kind: median(seconds) for kind, seconds in by_kind.items()}
    categories: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for name, kinds in phases.items():
        categories["communication"] += kinds["waited"]
        if name in _WORK:
            categories[_WORK[name]] += kinds["busy"]
            categories["idle"] += kinds["idle"]
        else:  # reading data and writing records is waiting for disks and other processes as well
            categories[name] += kinds["busy"] + kinds["idle"]
    own = [sum(kinds["busy"] + kinds["idle"] for kinds in step.values()) for step in by_step]
    return RankProfile(
        rank=rank,
        seconds=fmean((step.end - step.start) / 1e9 for step in steps),
        own_seconds=median(own),
        categories=categories,
        overlapped=fmean(_overlapped(step, ran, unseen) / 1e9 for step in steps),
        phases=phases,
        typical=typical,
        own_steps=tuple(own),
    )


def _one_step(step: StepTimes, unseen: Sequence[Interval], *, idles: bool) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase in one step: busy, idle, waited."""
    phases: dict[str, dict[str, float]] = {}
    waits = _united(step.waits, step)
    for name, phase_time in step.phase_times.items():
        wall, waited = phase_time.wall, phase_time.waited
        within = [phase for phase in step.phases if phase.name == name]
        late = sum(_length(_without(_overlap(unseen, phase), waits)) for phase in within)
        wall, waited = wall - late, waited + late
        busy = min(wall, phase_time.processor) if idles else wall
        phases[name] = {"busy": busy / 1e9, "idle": (wall - busy) / 1e9, "waited": waited / 1e9}
    return phases


def _overlapped(step: StepTimes, ran: Sequence[Interval], unseen: Sequence[Interval]) -> int:
    """Return the nanoseconds in which collectives ran while the rank didn't wait for any."""
    return _length(_without(_united(ran, step), _united([*step.waits, *unseen], step)))


def find_straggler(ranks: Sequence[RankProfile]) -> Straggler | None:
    """Find the rank whose own work takes a tenth of a step longer than the others' in most steps; else None."""
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.own_seconds)
    others = [rank for rank in ranks if rank is not slowest]
    usual = median(rank.own_seconds for rank in others)
    steps = list(zip(*(rank.own_steps for rank in ranks), strict=True))
    first = sum(slowest.own_steps[number] == max(own) for number, own in enumerate(steps))
    if slowest.own_seconds - usual < _HOLDS_UP * slowest.seconds or first < _MOSTLY * len(steps):
        return None
    differences = {
        (name, kind): kinds[kind] - median(other.typical[name][kind] for other in others)
        for name, kinds in slowest.typical.items()
        for kind in ("busy", "idle")
    }
    phase, kind = max(differences, key=lambda key: differences[key])
    return Straggler(rank=slowest.rank, own_seconds=slowest.own_seconds, others_seconds=usual, phase=phase, kind=kind)


Span = tuple[int, int]


def _overlap(intervals: Iterable[Interval], within: Interval | StepTimes) -> list[Span]:
    """Clip intervals to another one, and sort them."""
    cut = ((max(interval.start, within.start), min(interval.end, within.end)) for interval in intervals)
    return sorted((start, end) for start, end in cut if start < end)


def _united(intervals: Iterable[Interval], within: Interval | StepTimes) -> list[Span]:
    """Clip intervals to another one, and merge those that overlap or touch."""
    joined: list[Span] = []
    for start, end in _overlap(intervals, within):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """Subtract sorted, disjoint spans from spans."""
    left: list[Span] = []
    for start, end in spans:
        for from_, to in others:
            if to <= start or from_ >= end:
                continue
            if from_ > start:
                left.append((start, from_))
            start = min(end, to)
        if start < end:
            left.append((start, end))
    return left


def _length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
