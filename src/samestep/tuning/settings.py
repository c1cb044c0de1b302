"""What `samestep tune` can try: settings that change a step by rounding at most, and the values of each."""

import ctypes.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samestep.job import Job
from samestep.launch.affinity import cores, threads_of
from samestep.layout import Layout


@dataclass(frozen=True, kw_only=True)
class SettingCandidate:
    """One value of a setting."""

    value: str  # as it is shown
    run: Mapping[str, Any] = field(default_factory=dict)  # keys of `run:` that it sets
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys of `recipe:`; they change the result
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that the processes start with
    missing: str | None = None  # why it can't be tried on this machine

    def of(self, job: Job) -> Job:
        """The job with this value."""
        return replace(job, run=replace(job.run, **self.run), recipe=replace(job.recipe, **self.recipe))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting to try; `keeps_result` is False if it changes results beyond the order of sums."""

    name: str
    candidates: Callable[[Job, Layout], Sequence[SettingCandidate]]
    keeps_result: bool = True


def _transports(job: Job, layout: Layout) -> list[SettingCandidate]:
    """Other transports, where there are messages."""
    if layout.size == 1:
        return []
    others = [name for name in ("auto", "gloo") if name != job.run.transport]
    return [SettingCandidate(value=name, run={"transport": name}) for name in others]


def _threads(job: Job, layout: Layout) -> list[SettingCandidate]:
    """Half and twice the threads of a rank, as far as there are cores."""
    now = threads_of(layout.size, job.run.threads)
    counts = sorted({max(1, now // 2), min(cores(), now * 2)} - {now})
    return [SettingCandidate(value=str(threads), run={"threads": threads}) for threads in counts]


def _micro_batches(job: Job, layout: Layout) -> list[SettingCandidate]:
    """The whole slice of a rank, a half and a quarter of it; of a pipeline also less."""
    slice_ = -(-job.recipe.batch // layout.data_ranks)
    parts = (1, 2, 4, 8) if layout.pipeline > 1 else (1, 2, 4)
    sizes = dict.fromkeys(-(-slice_ // part) for part in parts)
    now = min(job.run.micro_batch or slice_, slice_)
    return [SettingCandidate(value=str(size), run={"micro_batch": size}) for size in sizes if size != now]


def _buckets(job: Job, layout: Layout) -> list[SettingCandidate]:
    """Other sizes of gradient buckets, in MiB."""
    if layout.size == 1:
        return []
    now = job.run.bucket_mb or 25.0
    return [
        SettingCandidate(value=f"{size:g}", run={"bucket_mb": size})
        for size in (1.0, 5.0, 25.0, 100.0)
        if size != now
    ]


def _compile(job: Job, layout: Layout) -> list[SettingCandidate]:
    other = not job.run.compile
    return [SettingCandidate(value=str(other).lower(), run={"compile": other})]


def _workers(job: Job, layout: Layout) -> list[SettingCandidate]:
    return [
        SettingCandidate(value=str(count), run={"workers": count}) for count in (0, 1, 2) if count != job.run.workers
    ]


def _allocators(job: Job, layout: Layout) -> list[SettingCandidate]:
    """Allocators of main memory that take malloc's place: where they are installed, by the name that loads them."""
    candidates: list[SettingCandidate] = []
    for name, libraries in {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc", "tcmalloc_minimal")}.items():
        file = next(filter(None, map(ctypes.util.find_library, libraries)), None)
        if file is None:
            candidates.append(SettingCandidate(value=name, missing=f"lib{name} is not installed"))
        else:
            candidates.append(SettingCandidate(value=name, environment={"LD_PRELOAD": file}))
    return candidates


def _precision(job: Job, layout: Layout) -> list[SettingCandidate]:
    return [SettingCandidate(value="bf16", recipe={"precision": "bf16"})] if job.recipe.precision == "fp32" else []


# In the order in which they are tried.
SETTINGS = (
    Setting(name="transport", candidates=_transports),
    Setting(name="threads", candidates=_threads),
    Setting(name="micro_batch", candidates=_micro_batches),
    Setting(name="bucket_mb", candidates=_buckets),
    Setting(name="compile", candidates=_compile),
    Setting(name="workers", candidates=_workers),
    Setting(name="allocator", candidates=_allocators),
    Setting(name="precision", candidates=_precision, keeps_result=False),
)
