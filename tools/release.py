"""Builds the wheels and sdists of samestep and samestep-prove, and tries them in an environment of their own.

python tools/release.py            `make release`: into dist/

1. The sources are copied, so that nothing gets in that an earlier build left; all is built of the copy.
2. The two wheels together must hold the files of src/samestep, each once and no others, and CHANGELOG.md must have
   their version.
3. An empty environment gets torch by its pinned version, then the wheels; there each template of `samestep init` is
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
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from release_records import REQUIREMENTS, SUMS, RecordError, sbom_command, write_requirements, write_sums

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
PROVE = Path("packages/prove")  # the distribution with the files that the other one leaves out
DISTRIBUTIONS = ("samestep", "samestep-prove")
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
    for name in ("src", PROVE):
        shutil.copytree(root / name, folder / name, ignore=LEFT_BEHIND)
    return folder


def source_files(root: Path) -> set[str]:
    """The files of the package and the modules beside it, as a wheel names them."""
    source = root / "src"
    files = [*(source / "samestep").rglob("*"), *source.glob("*.py")]
    return {path.relative_to(source).as_posix() for path in files if path.is_file()}


def wheel_faults(wheels: Sequence[Collection[str]], sources: Collection[str]) -> list[str]:
    """What is wrong with the files of wheels: those of the package that none or two have, and those of no package."""
    names = [name for wheel in wheels for name in wheel if not re.match(r"[^/]+\.dist-info/", name)]
    lacking = [f"{name} is missing" for name in sorted(set(sources) - set(names))]
    twice = [f"{name} is in two wheels" for name, count in sorted(Counter(names).items()) if count > 1]
    return lacking + twice + [f"{name} is not of the package" for name in sorted(set(names) - set(sources))]


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


def build(copy: Path, dist: Path) -> tuple[Sequence[Path], Sequence[Path]]:
    """Build the sdists, and the wheels from them. Raises ReleaseError where a file is missing, too many, or twice."""
    for place in (copy, copy / PROVE):
        _run([sys.executable, "-m", "build", "--outdir", str(dist), str(place)], cwd=copy)
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    sources = source_files(copy)
    names = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names.append(archive.namelist())
    _none(dist, wheel_faults(names, sources))
    for sdist, kept in zip(sdists, (sources, {*names[-1]} & sources), strict=True):
        with tarfile.open(sdist) as archive:
            _none(sdist, sdist_faults(archive.getnames(), kept))
    return wheels, sdists


def install(wheels: Sequence[Path], environment: Path) -> tuple[Path, Sequence[Path]]:
    """Install the wheels into an empty environment, torch first and pinned.

    Returns the folder of its programs, and pip's reports of what it installed.
    """
    _run([sys.executable, "-m", "venv", "--clear", str(environment)], cwd=ROOT)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    main, *others = wheels
    reports = [environment / f"installed-{number}.json" for number in range(2)]
    for report, packages in zip(reports, (["torch"], [f"{main}[text]", *map(str, others)]), strict=True):
        _run([*pip, "--report", str(report), *packages], cwd=ROOT)
    return environment / "bin", reports


def write_records(
    wheels: Sequence[Path], sdists: Sequence[Path], programs: Path, reports: Sequence[Path], version: str
) -> None:
    """Write the requirements with hashes, the SBOM and the sums beside the wheels."""
    dist = wheels[0].parent
    requirements, sbom = dist / REQUIREMENTS, dist / f"samestep-{version}.cdx.json"
    write_requirements(reports, requirements, without=DISTRIBUTIONS)
    _run(sbom_command(programs / "python", sbom, ROOT / "pyproject.toml"), cwd=ROOT)
    write_sums((*wheels, *sdists, requirements, sbom), dist / SUMS)


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
    parser = argparse.ArgumentParser(description="Build the wheels and sdists, and try the wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="made again (default: dist/)")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "release", help="made again")
    options = parser.parse_args()
    version = version_of(ROOT)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        _none(ROOT / "CHANGELOG.md", changelog_faults(changelog, version))
        shutil.rmtree(options.dist, ignore_errors=True)
        with TemporaryDirectory(prefix="samestep-release-") as folder:
            wheels, sdists = build(copy_sources(Path(folder) / "sources"), options.dist.resolve())
            place = Path(folder) / "jobs"
            place.mkdir()
            programs, reports = install(wheels, options.environment.resolve())
            write_records(wheels, sdists, programs, reports, version)
            try_out(programs, place, version)
    except (ReleaseError, RecordError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    names = ", ".join(file.name for file in (*wheels, *sdists))
    print(f"{names} are in {options.dist}, with {REQUIREMENTS}, an SBOM and {SUMS}")
    if f"## [{version}] - {UNDATED}" in changelog:
        print(f"CHANGELOG.md says {UNDATED} of {version}: write the date there before you publish it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
