"""Where a run's time and memory went: waiting for data, slow steps, memory near the machine's."""

import statistics
from collections.abc import Iterator
from typing import Any

from samestep.doctor.finding import Finding, in_gib, ok, warning
from samestep.doctor.memory import meminfo
from samestep.doctor.run.files import RunFiles, number

_WAITING = 0.2  # of the time, from which the loader is worth a remedy
_SLOW = 3.0  # times the median
_LOST = 0.05  # of the time
_ENOUGH = 5  # steps
_WARM_UP = 3  # the first steps make buffers and optimizer state, or compile
_FULL = 0.9  # of the machine's memory


def data(run: RunFiles) -> Iterator[Finding]:
    """The share of the time that ranks waited for samples."""
    waited, worked = run.numbers("data_seconds")[_WARM_UP:], run.numbers("step_seconds")[_WARM_UP:]
    if min(len(waited), len(worked)) < _ENOUGH or sum(waited) + sum(worked) == 0:
        return
    share = sum(waited) / (sum(waited) + sum(worked))
    text = f"{share:.0%} of the time is spent waiting for samples"
    if share > _WAITING:
        remedy = "run.workers: 2 or more loads in the background; prepare samples once, or keep them on a nearer disk"
        yield warning("data", text, remedy, share=share)
    else:
        yield ok("data", text, share=share)


def slow_steps(run: RunFiles) -> Iterator[Finding]:
    """Steps that took far longer than the others, and what they cost in all."""
    timed = [(line.get("step"), number(line.get("step_seconds"))) for line in run.steps.values[_WARM_UP:]]
    timed = [(step, seconds) for step, seconds in timed if seconds == seconds]
    if len(timed) < _ENOUGH:
        return
    median = statistics.median(seconds for _, seconds in timed)
    slow = [(step, seconds) for step, seconds in timed if seconds > _SLOW * median]
    lost = sum(seconds - median for _, seconds in slow) / max(sum(seconds for _, seconds in timed), 1e-12)
    values: dict[str, Any] = {
        "median_seconds": median,
        "slow_steps": [step for step, _ in slow[:100]],
        "share_lost": lost,
    }
    if slow and lost > _LOST:
        step, seconds = max(slow, key=lambda each: each[1])
        yield warning(
            "slow steps",
            f"{len(slow)} of {len(timed)} took more than {_SLOW:g} times the median ({median:.3g} s), "
            f"{lost:.0%} of the time; the worst, step {step}, {seconds:.3g} s",
            "look at what else runs on the hosts, at saving and at the disk in those steps; in a period of its own "
            "it is Python's garbage collection or an epoch's begin",
            **values,
        )
    else:
        yield ok("slow steps", f"none to speak of; the median is {median:.3g} s", **values)


def slow_ranks(run: RunFiles) -> Iterator[Finding]:
    """Ranks whose own part of a step takes clearly longer than the others', as the report says."""
    report = run.report or {}
    slow, seconds = report.get("slow_ranks"), report.get("own_step_seconds")
    if not isinstance(slow, list) or not isinstance(seconds, list) or len(seconds) < 2:
        return
    times = [number(each) for each in seconds]
    named = [f"rank {rank} ({times[rank]:.3g} s)" for rank in slow if isinstance(rank, int) and rank < len(times)]
    values: dict[str, Any] = {"slow_ranks": slow, "own_step_seconds": seconds}
    usual = statistics.median(times)
    if named:
        text = f"{', '.join(named[:5])} a step without waiting for others; the median of all is {usual:.3g} s"
        remedy = "look at what else runs on its host: samestep doctor there; cores and memory should be alike"
        yield warning("slow ranks", text, remedy, **values)
    else:
        yield ok("slow ranks", f"none; the median is {usual:.3g} s a step", **values)


def memory(run: RunFiles) -> Iterator[Finding]:
    """The ranks' peaks beside this machine's memory, where they were its."""
    report = run.report or {}
    peaks, total = report.get("peak_memory_bytes"), meminfo().get("MemTotal")
    if not isinstance(peaks, list) or not total or report.get("device") != "cpu":
        return
    held = sum(value for each in peaks if (value := number(each)) == value)
    text = f"the ranks held {in_gib(held)} at their peaks; this machine has {in_gib(total)}"
    if held > _FULL * total:
        remedy = "if it ran here: more sharding (fsdp), recompute=full, a smaller run.micro_batch, or fewer ranks"
        yield warning("memory", text, remedy, held_bytes=held, total_bytes=total)
    else:
        yield ok("memory", text, held_bytes=held, total_bytes=total)
