"""From what the ranks' clocks noted to categories that add up to a step, and the rank that holds the others up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from samestep.profiling.clock import Interval, StepTimes

# They add up to a step's wall time. Communication is what a rank waited for; what ran beside its work is apart.
CATEGORIES = ("compute", "communication", "data", "optimizer", "other", "idle")
_WORK = {"forward": "compute", "backward": "compute", "optimizer": "optimizer"}

_HOLDS_UP = 0.1  # of a step: how much longer than the others' the slowest rank's own work takes
_MOSTLY = 0.8  # of the steps: in how many it is the slowest


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Seconds of one rank a step, means over the profiled steps where nothing else is said."""

    rank: int
    seconds: float  # wall time, from asking for one step's data to asking for the next's
    own_seconds: float  # median, without waiting for messages
    categories: Mapping[str, float]  # by CATEGORIES; their sum is `seconds`
    overlapped: float  # communication beside which the rank worked
    phases: Mapping[str, Mapping[str, float]]  # of each phase of a step: busy, idle, waited
    typical: Mapping[str, Mapping[str, float]]  # the same, medians, which one interrupted step does not move
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
                name: {kind: each * 1e3 for kind, each in kinds.items()} for name, kinds in self.phases.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank for whose own work the others wait."""

    rank: int
    own_seconds: float
    others_seconds: float  # median of the other ranks' own work
    phase: str  # in which most of the difference lies
    kind: str  # busy: it worked; idle: it didn't run


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a training's steps went, on every rank."""

    layout: str
    steps: tuple[int, ...]  # that were profiled, counted from 0
    ranks: tuple[RankProfile, ...]
    straggler: Straggler | None
    usual_seconds: float | None  # median of rank 0's other steps, which no profiler made slower; None: there are none
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
    """What one rank's clock noted in `steps`, one or more.

    `ran`: when collectives ran or were on their way. `unseen`: waits in the rank's own thread of which the clock was
    not told. `idles`: whether a thread that uses no processor is idle; it isn't where it waits for an accelerator.
    """
    each = [_one_step(step, unseen, idles=idles) for step in steps]
    phases: dict[str, dict[str, float]] = {}
    typical: dict[str, dict[str, float]] = {}
    for name in ("data", "forward", "backward", "optimizer", "other"):
        found = [step.get(name, {}) for step in each]
        by_kind = {kind: [one.get(kind, 0.0) for one in found] for kind in ("busy", "idle", "waited")}
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
    own = [sum(kinds["busy"] + kinds["idle"] for kinds in step.values()) for step in each]
    return RankProfile(
        rank=rank,
        seconds=fmean((step.end - step.start) / 1e9 for step in steps),
        own_seconds=median(own),
        categories=categories,
        overlapped=fmean(_beside(step, ran, unseen) / 1e9 for step in steps),
        phases=phases,
        typical=typical,
        own_steps=tuple(own),
    )


def _one_step(step: StepTimes, unseen: Sequence[Interval], *, idles: bool) -> dict[str, dict[str, float]]:
    """Seconds of each phase in one step: busy, idle, waited."""
    found: dict[str, dict[str, float]] = {}
    known = _united(step.waits, step)
    for name, portion in step.portions.items():
        wall, waited = portion.wall, portion.waited
        within = [phase for phase in step.phases if phase.name == name]
        late = sum(_length(_without(_overlap(unseen, phase), known)) for phase in within)
        wall, waited = wall - late, waited + late
        busy = min(wall, portion.processor) if idles else wall
        found[name] = {"busy": busy / 1e9, "idle": (wall - busy) / 1e9, "waited": waited / 1e9}
    return found


def _beside(step: StepTimes, ran: Sequence[Interval], unseen: Sequence[Interval]) -> int:
    """Nanoseconds in which collectives ran and the rank didn't wait for any."""
    return _length(_without(_united(ran, step), _united([*step.waits, *unseen], step)))


def find_straggler(ranks: Sequence[RankProfile]) -> Straggler | None:
    """The slowest rank, where its own work takes a tenth of a step longer than the others' in most steps."""
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
    """The parts of intervals that lie within another, in order."""
    cut = ((max(each.start, within.start), min(each.end, within.end)) for each in intervals)
    return sorted((start, end) for start, end in cut if start < end)


def _united(intervals: Iterable[Interval], within: Interval | StepTimes) -> list[Span]:
    """The same, with those joined that touch."""
    joined: list[Span] = []
    for start, end in _overlap(intervals, within):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """What is left of spans outside of others, which are in order and apart."""
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
