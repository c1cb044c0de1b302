"""What a run of `samestep comm` has found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.comm.measure import Fit, Row


@dataclass(frozen=True, kw_only=True)
class Check:
    """A collective tried with one dtype through one transport."""

    transport: str
    collective: str
    dtype: str
    reason: str | None  # why it does not work; None where its result is right on every rank
    wrong: bool = False  # it gave a result, and that is not right

    def to_json(self) -> dict[str, Any]:
        named = {"transport": self.transport, "collective": self.collective, "dtype": self.dtype}
        return {**named, "right": self.reason is None, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds bus bandwidth: bytes a second."""

    copies: Mapping[int, float]  # by the bytes of a copy: of each rank, while all ranks of its host copy
    interface: str | None = None  # between hosts
    adapter: float | None = None  # what its driver says
    stream: float | None = None  # one TCP connection

    @property
    def link(self) -> float | None:
        """What the link between hosts carries: what its driver says, and otherwise what was measured."""
        return self.adapter or self.stream

    def of(self, size: int, *, one_host: bool) -> float | None:
        """The limit for messages of so many bytes."""
        if not one_host:
            return self.link
        nearest = min(self.copies, key=lambda each: abs(each - size), default=None)
        return None if nearest is None or not size else self.copies[nearest]

    def to_json(self) -> dict[str, Any]:
        """Bytes a second that memory, adapter and one stream allow."""
        return {
            "memory_copy": [{"bytes": size, "bytes_per_second": rate} for size, rate in self.copies.items()],
            "interface": self.interface,
            "adapter_bytes_per_second": self.adapter,
            "stream_bytes_per_second": self.stream,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was measured, by all ranks together."""

    hosts: tuple[str, ...]  # the host of each rank
    transports: tuple[str, ...]
    missing: Mapping[str, str]  # a transport that can't be had here, and why
    checks: Sequence[Check]
    rows: Sequence[Row]
    fits: Sequence[Fit]
    limits: Limits
    host: Mapping[str, Any] = field(default_factory=dict)  # the machine of rank 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    @property
    def passed(self) -> bool:
        """Whether every result was right. A dtype that a back end refuses is not a wrong result."""
        return not any(check.wrong for check in self.checks)

    def limit(self, row: Row) -> float | None:
        """Bytes a second that bound a row; None where they aren't known, as between a host's accelerators."""
        if self.one_host and row.device != "cpu":
            return None
        return self.limits.of(row.bytes, one_host=self.one_host)

    def to_json(self) -> dict[str, Any]:
        """What `samestep comm --json` writes: seconds, bytes, and bytes a second."""
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
