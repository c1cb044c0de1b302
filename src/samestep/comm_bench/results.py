"""What a run of `samestep comm` has found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.comm.measure import CollectiveTiming, Fit


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one collective with one dtype through one transport."""

    transport: str
    collective: str
    dtype: str
    reason: str | None  # why it failed; None if the result is right on every rank
    wrong: bool = False  # it returned a wrong result

    def to_json(self) -> dict[str, Any]:
        named = {"transport": self.transport, "collective": self.collective, "dtype": self.dtype}
        return {**named, "right": self.reason is None, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class BandwidthLimits:
    """Upper limits of bus bandwidth, in bytes a second."""

    copies: Mapping[int, float]  # bytes of a copy -> rate of each rank, while all ranks of its host copy
    interface: str | None = None  # between hosts
    adapter: float | None = None  # what its driver says
    stream: float | None = None  # one TCP connection

    @property
    def link(self) -> float | None:
        """Bandwidth of the link between hosts: the rate that its driver reports, else the measured one."""
        return self.adapter or self.stream

    def of(self, size: int, *, one_host: bool) -> float | None:
        """The limit for messages of so many bytes."""
        if not one_host:
            return self.link
        nearest = min(self.copies, key=lambda size_: abs(size_ - size), default=None)
        return None if nearest is None or not size else self.copies[nearest]

    def to_json(self) -> dict[str, Any]:
        """Return the rates of memory, adapter and one TCP stream as JSON."""
        return {
            "memory_copy": [{"bytes": size, "bytes_per_second": rate} for size, rate in self.copies.items()],
            "interface": self.interface,
            "adapter_bytes_per_second": self.adapter,
            "stream_bytes_per_second": self.stream,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The measurements of all ranks."""

    hosts: tuple[str, ...]  # the host of each rank
    transports: tuple[str, ...]
    missing: Mapping[str, str]  # transport -> why it is unavailable here
    checks: Sequence[Check]
    rows: Sequence[CollectiveTiming]
    fits: Sequence[Fit]
    limits: BandwidthLimits
    host: Mapping[str, Any] = field(default_factory=dict)  # the machine of rank 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    @property
    def passed(self) -> bool:
        """Whether every result was right. A dtype that a back end refuses is not a wrong result."""
        return not any(check.wrong for check in self.checks)

    def limit(self, row: CollectiveTiming) -> float | None:
        """Upper limit of a row's bandwidth; None if unknown, as between accelerators of one host."""
        if self.one_host and row.device != "cpu":
            return None
        return self.limits.of(row.bytes, one_host=self.one_host)

    def to_json(self) -> dict[str, Any]:
        """Return what `samestep comm --json` writes: seconds, bytes, and bytes a second."""
        return {
            "ranks": len(self.hosts),
            "hosts": list(self.hosts),
            "transports": list(self.transports),
            "missing": dict(self.missing),
            "passed": self.passed,
            "checks": [check.to_json() for check in self.checks],
            "rows": [{**row.to_json(), "limit": self.limit(row)} for row in self.rows],
            "fits": [fit.to_json() for fit in self.fits],
            "limits": self.limits.to_json(),
            "host": dict(self.host),
        }
