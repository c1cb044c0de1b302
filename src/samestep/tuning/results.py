"""Trials of `samestep tune` and their gains, and their table in the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import yaml
from rich.console import Console

from samestep.display.tables import WIDTH, numbers, plain_console, table, texts
from samestep.job import Job
from samestep.jobfile import plain

Status = Literal["kept", "not better", "changes the result", "refused", "failed", "not installed"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a step: the median of each repeat."""

    repeats: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the repeats."""
        return median(self.repeats)

    @property
    def noise(self) -> float:
        """Half the range of the repeats, relative to the median."""
        return (max(self.repeats) - min(self.repeats)) / 2 / self.seconds


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One value of one setting, and what was best before it."""

    setting: str
    value: str
    status: Status
    timing: Timing | None = None
    before: Timing | None = None  # what was best, in the same repeats
    reason: str | None = None  # why there is no timing

    @property
    def worth(self) -> float | None:
        """Speedup over the best settings before it."""
        return None if self.timing is None or self.before is None else self.before.seconds / self.timing.seconds

    @property
    def noise(self) -> float | None:
        """The larger noise of the two; smaller speedups are not significant."""
        return None if self.timing is None or self.before is None else max(self.timing.noise, self.before.noise)

    def to_json(self) -> dict[str, Any]:
        """Seconds a step before and with a value; `noise` is the larger one of the two."""
        return {
            "setting": self.setting,
            "value": self.value,
            "status": self.status,
            "reason": self.reason,
            "seconds": None if self.timing is None else self.timing.seconds,
            "repeats": None if self.timing is None else list(self.timing.repeats),
            "before_seconds": None if self.before is None else self.before.seconds,
            "before_repeats": None if self.before is None else list(self.before.repeats),
            "worth": self.worth,
            "noise": self.noise,
        }


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """A tuned job: `job` has the settings that were kept."""

    job: Job
    at_first: Timing
    at_last: Timing  # of the settings kept, in the last repeats that had them
    rows: Sequence[TuningRow]
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to start it with
    remarks: Sequence[str] = ()  # messages that trials printed, such as that another way to send is used

    @property
    def run(self) -> dict[str, Any]:
        """The keys of `run:` that were kept, and the layout for which they are."""
        kept = {row.setting: plain(getattr(self.job.run, row.setting)) for row in self.rows if self._is_key(row)}
        return {"layout": self.job.run.layout, **kept}

    def _is_key(self, row: TuningRow) -> bool:
        return row.status == "kept" and hasattr(self.job.run, row.setting)

    def to_json(self) -> dict[str, Any]:
        return {
            "at_first": asdict(self.at_first),
            "at_last": asdict(self.at_last),
            "run": self.run,
            "environment": dict(self.environment),
            "remarks": list(self.remarks),
            "rows": [row.to_json() for row in self.rows],
        }


def print_tuned(tuned: TuningResult, console: Console | None = None) -> None:
    """A row for each value, the gain of all that were kept, and the section to paste."""
    console = console or plain_console(width=WIDTH)
    repeats = len(tuned.at_first.repeats)
    columns = [
        *texts("setting", "value", whole=True),
        *numbers("ms", "before", "times as fast", "noise", whole=True),
        *texts(""),
    ]
    rows = [[row.setting, row.value, *_numbers(row), row.status] for row in tuned.rows]
    title = f"{tuned.job.run.layout}: ms of a step, medians of {repeats}, versus the best so far"
    console.print(table(columns, rows, title=title))
    for row in tuned.rows:
        if row.reason is not None:
            console.print(f"{row.status}: {row.setting} {row.value}: {row.reason}", soft_wrap=True)
    for remark in tuned.remarks:
        console.print(remark, soft_wrap=True)
    first, last = tuned.at_first.seconds, tuned.at_last.seconds
    if any(row.status == "kept" for row in tuned.rows):
        gain = f"a step took {first * 1e3:.1f} ms, and takes {last * 1e3:.1f} ms: {first / last:.2f} times as fast"
        console.print(gain, soft_wrap=True)
    else:  # both times are of the same settings
        console.print(f"no value is faster; a step takes {first * 1e3:.1f} ms", soft_wrap=True)
    console.print(section(tuned), end="")
    if tuned.environment:
        variables = " ".join(f"{name}={value}" for name, value in tuned.environment.items())
        console.print(f"start it with {variables} before the command", soft_wrap=True)


def section(tuned: TuningResult) -> str:
    """The `run:` section that was found best, as YAML."""
    return yaml.safe_dump({"run": tuned.run}, sort_keys=False, allow_unicode=True)


def _numbers(row: TuningRow) -> list[str]:
    """Cells of a row in milliseconds."""
    if row.timing is None or row.before is None or row.worth is None:
        return [""] * 4
    before = f"{row.before.seconds * 1e3:.1f}"
    return [f"{row.timing.seconds * 1e3:.1f}", before, f"{row.worth:.2f}", f"{row.noise:.0%}"]
