"""Builds the wheel and the sdist, and tries the wheel in an environment of its own.

python tools/release.py            `make release`: into dist/

1. The sources are copied, so that nothing gets in that an earlier build left; sdist and wheel are built of the copy.
2. The wheel must hold the files of src/samestep, all of them and no others, and CHANGELOG.md must have its version.
3. An empty environment gets torch by its pinned version, then the wheel; there each template of `samestep init` is
   written, trained and proved in two processes, in a folder from which the repository can't be imported.
4. Beside them go what that environment was made of, with hashes and as an SBOM, and the sums of all files
   (`release_records.py`).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from release_records import REQUIREMENTS, SUMS, RecordError, sbom_command, write_requirements, write_sums

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
UNDATED = "Unreleased"  # in place of a version's date, until it is published
TIME_LIMIT = 3600.0  # seconds of one command, of which the installation of torch takes longest

# Variables that would let the environment see other packages than its own.
OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ReleaseError(Exception):
    """The release is not fit to publish: what is wrong with which file."""


def copy_sources(folder: Path, root: Path = ROOT) -> Path:
    """Copy what a build needs, without what earlier builds and runs have left between it. Returns the copy."""
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(root / name, folder / name)
    shutil.copytree(root / "src", folder / "src", ignore=LEFT_BEHIND)
    return folder


def source_files(root: Path) -> set[str]:
    """The files of the package, as a wheel names them."""
    source = root / "src"
    return {path.relative_to(source).as_posix() for path in (source / "samestep").rglob("*") if path.is_file()}


def wheel_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """What is wrong with the files of a wheel: those of the package that it lacks, and those of nothing in it."""
    of_package = {name for name in names if not re.match(r"[^/]+\.dist-info/", name)}
    lacking = [f"{name} is missing" for name in sorted(set(sources) - of_package)]
    return lacking + [f"{name} is not of the package" for name in sorted(of_package - set(sources))]


def sdist_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """What an sdist lacks to build the wheel from it."""
    inside = {name.partition("/")[2] for name in names}
    wanted = {*(f"src/{name}" for name in sources), "pyproject.toml", "README.md", "LICENSE"}
    return [f"{name} is missing" for name in sorted(wanted - inside)]


def version_of(root: Path) -> str:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def changelog_faults(changelog: str, version: str) -> list[str]:
    """Whether the changelog has a section of the version, dated or to be dated (Keep a Changelog 1.1.0)."""
    if re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d|{UNDATED})$", changelog, re.MULTILINE):
        return []
    return [f"no section [{version}] - YEAR-MONTH-DAY; make one of what stands under [Unreleased]"]


def build(copy: Path, dist: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it. Raises ReleaseError where a file of one is missing or too many."""
    _run([sys.executable, "-m", "build", "--outdir", str(dist), str(copy)], cwd=copy)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    sources = source_files(copy)
    with zipfile.ZipFile(wheel) as archive:
        _none(wheel, wheel_faults(archive.namelist(), sources))
    with tarfile.open(sdist) as archive:
        _none(sdist, sdist_faults(archive.getnames(), sources))
    return wheel, sdist


def install(wheel: Path, environment: Path) -> tuple[Path, Sequence[Path]]:
    """Install the wheel into an empty environment, torch first and pinned.

    Returns the folder of its programs, and pip's reports of what it installed.
    """
    _run([sys.executable, "-m", "venv", "--clear", str(environment)], cwd=ROOT)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    reports = [environment / f"installed-{number}.json" for number in range(2)]
    for report, package in zip(reports, ("torch", f"{wheel}[text]"), strict=True):
        _run([*pip, "--report", str(report), package], cwd=ROOT)
    return environment / "bin", reports


def write_records(wheel: Path, sdist: Path, programs: Path, reports: Sequence[Path], version: str) -> None:
    """Write the requirements with hashes, the SBOM and the sums beside the wheel."""
    requirements, sbom = wheel.parent / REQUIREMENTS, wheel.parent / f"samestep-{version}.cdx.json"
    write_requirements(reports, requirements, without="samestep")
    _run(sbom_command(programs / "python", sbom, ROOT / "pyproject.toml"), cwd=ROOT)
    write_sums((wheel, sdist, requirements, sbom), wheel.parent / SUMS)


def try_out(programs: Path, place: Path, version: str) -> None:
    """Write, train and prove every template by the installed `samestep`. Raises ReleaseError where one fails."""
    samestep = str(programs / "samestep")
    told = _run([samestep, "--version"], cwd=place, capture=True)
    if told.strip() != f"samestep {version}":
        raise ReleaseError(f'samestep --version says "{told.strip()}" in place of "samestep {version}"')
    listed = _run([samestep, "init", "--list"], cwd=place, capture=True)
    for name in [line.split()[0] for line in listed.splitlines()]:
        began = time.monotonic()
        _run([samestep, "init", name, name], cwd=place)
        for command in ("train", "verify"):
            _run([samestep, command, f"{name}/job.yaml", "--layout", "dp2"], cwd=place)
        print(f"{name}: written, trained and proved in {time.monotonic() - began:.0f} s", flush=True)


def _run(command: Sequence[str], *, cwd: Path, capture: bool = False) -> str:
    print("$", *command, flush=True)
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_own(os.environ),
        timeout=TIME_LIMIT,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout or ""


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in OTHERS}


def _none(file: Path, faults: Sequence[str]) -> None:
    if faults:
        raise ReleaseError("\n".join(f"{file.name}: {fault}" for fault in faults))


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and the sdist, and try the wheel.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="made again (default: dist/)")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "release", help="made again")
    options = parser.parse_args()
    version = version_of(ROOT)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        _none(ROOT / "CHANGELOG.md", changelog_faults(changelog, version))
        shutil.rmtree(options.dist, ignore_errors=True)
        with TemporaryDirectory(prefix="samestep-release-") as folder:
            wheel, sdist = build(copy_sources(Path(folder) / "sources"), options.dist.resolve())
            place = Path(folder) / "jobs"
            place.mkdir()
            programs, reports = install(wheel, options.environment.resolve())
            write_records(wheel, sdist, programs, reports, version)
            try_out(programs, place, version)
    except (ReleaseError, RecordError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.name} and {sdist.name} are in {options.dist}, with {REQUIREMENTS}, an SBOM and {SUMS}")
    if f"## [{version}] - {UNDATED}" in changelog:
        print(f"CHANGELOG.md says {UNDATED} of {version}: write the date there before you publish it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
