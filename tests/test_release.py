"""Two wheels hold the package's files, each once; the prover's has what it imports; what lies beside is right."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import release
import release_records

import samestep
from samestep.cli.main import main

BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
PLACES = {"samestep": ".", "samestep-prove": "packages/prove"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.copy_sources(tmp_path_factory.mktemp("release") / "sources")


@pytest.fixture(scope="module")
def wheels(sources: Path) -> dict[str, list[str]]:
    """The files of each wheel, built with the hatchling that is here, without an environment for it."""
    pytest.importorskip("hatchling")
    files = {}
    for name, place in PLACES.items():
        dist = sources.parent / f"dist-{name}"
        dist.mkdir()
        subprocess.run([sys.executable, "-c", BUILD, str(dist)], cwd=sources / place, capture_output=True, check=True)
        (wheel,) = dist.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files[name] = archive.namelist()
    return files


def test_the_wheels_have_each_file_of_the_package_once_and_no_others(
    sources: Path, wheels: dict[str, list[str]]
) -> None:
    assert release.wheel_faults(list(wheels.values()), release.source_files(sources)) == []
    assert {
        "samestep/job.schema.json",
        "samestep/comm/shared_memory/kernel.cpp",
        "samestep/templates/text/job.yaml",
        "samestep/templates/own/task.py",
    } <= {*wheels["samestep"]}
    assert {
        "samestep/__init__.py",
        "samestep/py.typed",
        "samestep/display/page.html",
        "samestep/display/page.css",
        "samestep/display/page.js",
    } <= {*wheels["samestep-prove"]}
    for names in wheels.values():
        beside = {name.rpartition("/")[2] for name in names if ".dist-info/" in name}
        assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt"} <= beside


@pytest.mark.slow
def test_the_provers_wheel_has_all_that_it_imports(
    tmp_path: Path, sources: Path, wheels: dict[str, list[str]]
) -> None:
    pattern = re.compile(r"samestep/.*\.(py|html|css|js)")
    for name in filter(pattern.fullmatch, wheels["samestep-prove"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((sources / "src" / name).read_bytes())
    modules = sorted(path.relative_to(tmp_path) for path in (tmp_path / "samestep").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in modules]
    # Imports inside of functions, too: each module's own names of samestep are looked up.
    program = (
        "import ast, importlib, importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    tree = ast.parse(open(importlib.import_module(name).__file__, encoding='utf-8').read())\n"
        "    for node in ast.walk(tree):\n"
        "        if name == 'samestep' or not isinstance(node, ast.ImportFrom):\n"
        "            continue\n"
        "        if str(node.module).startswith('samestep'):\n"
        "            module = importlib.import_module(node.module)\n"
        "            for alias in node.names:\n"
        "                if alias.name != '__version__' and not hasattr(module, alias.name):\n"
        "                    importlib.import_module(f'{node.module}.{alias.name}')\n"
        "print(sorted(set(sys.modules) & {'transformers', 'pydantic', 'yaml', 'safetensors'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_both_say_the_same_version() -> None:
    settings = {
        name: tomllib.loads((release.ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name, place in PLACES.items()
    }
    number = settings["samestep"]["version"]
    assert settings["samestep-prove"]["version"] == number
    assert f"samestep-prove=={number}" in settings["samestep"]["dependencies"]
    needed = {re.split("[<>=]", text)[0]: text for text in settings["samestep"]["dependencies"]}
    for text in settings["samestep-prove"]["dependencies"]:
        assert re.split("[<>=]", text)[0] in needed


def test_a_file_that_is_missing_or_too_many_is_found() -> None:
    sources = {"samestep/__init__.py", "samestep/py.typed"}
    names = ["samestep/__init__.py", "samestep-1.0.dist-info/METADATA", "tests/test_layout.py"]
    assert release.wheel_faults([names, names[:1]], sources) == [
        "samestep/py.typed is missing",
        "samestep/__init__.py is in two wheels",
        "tests/test_layout.py is not of the package",
    ]
    files = ["pyproject.toml", "README.md", "LICENSE", "src/samestep/__init__.py", "src/samestep/py.typed"]
    assert release.sdist_faults([f"samestep-1.0/{name}" for name in files], sources) == []
    assert release.sdist_faults([f"samestep-1.0/{name}" for name in files[1:]], sources) == [
        "pyproject.toml is missing"
    ]


def test_what_is_built_or_compiled_beside_the_sources_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    kept = (*release.FILES, "src/samestep/__init__.py", "packages/prove/pyproject.toml")
    for name in (*kept, "src/samestep/__pycache__/a.pyc", "src/s.egg-info/PKG"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("", encoding="utf-8")
    copy = release.copy_sources(tmp_path / "copy", root)
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert files == {*kept}


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


def test_the_sums_of_files_are_checked_by_sha256sum(tmp_path: Path) -> None:
    files = [tmp_path / "b.whl", tmp_path / "a.tar.gz"]
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    sums = tmp_path / release_records.SUMS
    release_records.write_sums(files, sums)
    lines = sums.read_text(encoding="utf-8").splitlines()
    assert [line.split("  ") for line in lines] == [
        [hashlib.sha256(file.read_bytes()).hexdigest(), file.name] for file in sorted(files)
    ]
    command = ["sha256sum", "--check", "--strict", "--quiet", sums.name]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    files[0].write_bytes(b"altered")
    assert subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode == 1


def report_of(name: str, number: str, **archive: Any) -> dict[str, Any]:
    """What `pip install --report` says of a package."""
    info = {"url": f"https://example.org/{name}.whl", **archive}
    return {"install": [{"metadata": {"name": name, "version": number}, "download_info": info}]}


def test_requirements_have_a_version_and_a_sum_of_each_package(tmp_path: Path) -> None:
    sums = {"archive_info": {"hashes": {"sha256": "ab" * 32}}}
    reports = [report_of("torch", "2.13.0+cpu", **sums), report_of("Jinja2", "3.1.6", **sums)]
    reports.append(report_of("samestep", "0.1.0", archive_info={}))  # the wheel itself, whose sum is in SHA256SUMS
    written = release_records.hashed_requirements(reports, without=("samestep",)).splitlines()
    assert written[0].startswith("# For Python 3.")
    assert written[1:] == [f"Jinja2==3.1.6 --hash=sha256:{'ab' * 32}", f"torch==2.13.0+cpu --hash=sha256:{'ab' * 32}"]
    with pytest.raises(release_records.RecordError, match="torch 2: pip knows no SHA-256"):
        release_records.hashed_requirements([report_of("torch", "2", dir_info={})], without=("samestep",))


@pytest.mark.slow
def test_pip_takes_the_requirements_and_no_other_file(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    report, requirements = tmp_path / "report.json", tmp_path / "requirements.txt"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
    pip += ["--no-index", "--find-links", str(tmp_path)]
    subprocess.run([*pip, "--report", str(report), "tiny"], check=True, capture_output=True)
    release_records.write_requirements([report], requirements, without=("samestep",))
    hashed = [*pip, "--require-hashes", "-r", str(requirements)]
    assert subprocess.run(hashed, check=False, capture_output=True).returncode == 0
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more.py", "import os")
    refused = subprocess.run(hashed, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_bill_of_materials_names_torch_with_its_version(tmp_path: Path) -> None:
    """Its validation takes a quarter of a minute of a core."""
    pytest.importorskip("cyclonedx_py", exc_type=ImportError)
    file = tmp_path / "samestep.cdx.json"
    command = release_records.sbom_command(Path(sys.executable), file, release.ROOT / "pyproject.toml")
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    bill = json.loads(file.read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "samestep"
    versions = {each["name"]: each["version"] for each in bill["components"]}
    assert versions["torch"] == version("torch")
    assert versions["numpy"] == version("numpy")
