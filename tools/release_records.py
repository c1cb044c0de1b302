"""What `make release` writes beside the wheel and the sdist, so that who installs them can check what they get.

- `requirements.txt`: every package that the wheel was tried with, pinned by version and SHA-256, for pip's
  `--require-hashes`
- `samestep-VERSION.cdx.json`: the same packages as a bill of materials (SBOM) in CycloneDX's JSON
- `SHA256SUMS`: the sums of all these files, for `sha256sum --check`
"""

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REQUIREMENTS, SUMS = "requirements.txt", "SHA256SUMS"
_PART = 1 << 20  # bytes that are read at once


class RecordError(Exception):
    """A record can't be written: what is missing of which package."""


def sum_of(file: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            found.update(part)
    return found.hexdigest()


def write_sums(files: Iterable[Path], target: Path) -> None:
    """Write the sums of files, which lie beside `target`, in the form of `sha256sum`."""
    lines = [f"{sum_of(file)}  {file.name}\n" for file in sorted(files)]
    target.write_text("".join(lines), encoding="utf-8")


def hashed_requirements(reports: Sequence[Mapping[str, Any]], *, without: Sequence[str]) -> str:
    """The packages of pip's installation reports, each with its version and its sum.

    `without`: the packages whose requirements they are. Raises RecordError for a package that has no sum.
    """
    found: dict[str, str] = {}
    for each in (package for report in reports for package in report["install"]):
        name, version = each["metadata"]["name"], each["metadata"]["version"]
        if name in without:
            continue
        sums = each["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" not in sums:
            raise RecordError(f"{name} {version}: pip knows no SHA-256 of it, from {each['download_info']['url']}")
        found[name.lower()] = f"{name}=={version} --hash=sha256:{sums['sha256']}\n"
    made = (
        f"# For Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
    )
    head = f"{made}: pip install --require-hashes -r {REQUIREMENTS}, then the wheels with --no-deps.\n"
    return head + "".join(found[name] for name in sorted(found))


def write_requirements(reports: Sequence[Path], target: Path, *, without: Sequence[str]) -> None:
    """Write `hashed_requirements` of the files that `pip install --report` has written."""
    read = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    target.write_text(hashed_requirements(read, without=without), encoding="utf-8")


def sbom_command(python: Path, target: Path, project: Path) -> list[str]:
    """The command that writes the SBOM of an environment's packages: of cyclonedx-bom, which validates it too."""
    output = [
        "--output-format",
        "JSON",
        "--spec-version",
        "1.6",
        "--output-reproducible",
        "--output-file",
        str(target),
    ]
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--pyproject",
        str(project),
        "--mc-type",
        "library",
    ]
    return [*command, *output, str(python)]
