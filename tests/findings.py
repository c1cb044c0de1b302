"""What `samestep doctor` has found, as tests look at it."""

from collections.abc import Iterable
from typing import Any

from samestep.doctor.findings import DoctorFinding

GIB = 2**30


def only(findings: Iterable[DoctorFinding]) -> DoctorFinding:
    (finding,) = findings
    return finding


def by_subject(findings: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in findings}
