"""The wheel holds the package's files, all of them and no others, and the changelog has the version."""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import release

import samestep
from samestep.cli.main import main

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.copy_sources(tmp_path_factory.mktemp("release") / "sources")


@pytest.fixture(scope="module")
def names(sources: Path) -> list[str]:
    """The files of a wheel that is built with the setuptools that is here, without an environment for it."""
    pytest.importorskip("setuptools", minversion="77")
    dist = sources.parent / "dist"
    dist.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(dist)], cwd=sources, capture_output=True, check=True)
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_a_wheel_has_the_files_of_the_package_and_no_others(sources: Path, names: list[str]) -> None:
    assert release.wheel_faults(names, release.source_files(sources)) == []
    assert not any(name.startswith("tests/") or "/tests/" in name for name in names)
    assert {
        "samestep/py.typed",
        "samestep/comm/shared_memory/kernel.cpp",
        "samestep/display/page.html",
        "samestep/display/page.css",
        "samestep/display/page.js",
        "samestep/templates/text/job.yaml",
        "samestep/templates/own/task.py",
    } <= set(names)
    beside = {name.rpartition("/")[2] for name in names if ".dist-info/" in name}
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"} <= beside


def test_a_file_that_is_missing_or_too_many_is_found() -> None:
    sources = {"samestep/__init__.py", "samestep/py.typed"}
    names = ["samestep/__init__.py", "samestep-1.0.dist-info/METADATA", "tests/test_layout.py"]
    assert release.wheel_faults(names, sources) == [
        "samestep/py.typed is missing",
        "tests/test_layout.py is not of the package",
    ]
    files = ["pyproject.toml", "README.md", "LICENSE", "src/samestep/__init__.py", "src/samestep/py.typed"]
    assert release.sdist_faults([f"samestep-1.0/{name}" for name in files], sources) == []
    assert release.sdist_faults([f"samestep-1.0/{name}" for name in files[1:]], sources) == [
        "pyproject.toml is missing"
    ]


def test_what_is_built_or_compiled_beside_the_sources_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in (*release.FILES, "src/samestep/__init__.py", "src/samestep/__pycache__/a.pyc", "src/s.egg-info/PKG"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("", encoding="utf-8")
    copy = release.copy_sources(tmp_path / "copy", root)
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert files == {*release.FILES, "src/samestep/__init__.py"}


def test_the_changelog_has_the_version_and_every_place_says_the_same_one(capsys: pytest.CaptureFixture[str]) -> None:
    written = release.version_of(release.ROOT)
    changelog = (release.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert release.changelog_faults(changelog, written) == []
    assert release.changelog_faults(changelog, "99.0.0") != []
    assert samestep.__version__ == version("samestep") == written
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"samestep {written}\n"
