"""`samestep doctor`: planted faults of cores, memory, disks, limits and packages."""

import shutil
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from findings import GIB, only

from samestep.doctor import machine
from samestep.doctor.findings import ExaminationRequest

pytestmark = pytest.mark.quick

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "?\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_cgroup_is_read(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert machine.cpu_quota(tmp_path) == quota


def test_a_quota_below_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda groups: 0.5)
    found = only(machine.cores(ExaminationRequest()))
    assert found.verdict == "warning"
    assert "--threads 1" in (found.remedy or "")


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    assert only(machine.threads(ExaminationRequest())).verdict == "warning"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert only(machine.threads(ExaminationRequest())).verdict == "ok"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert only(machine.threads(ExaminationRequest())).verdict == "ok"


@pytest.mark.parametrize(
    ("total", "free", "verdict"),
    [(64 * 2**20, 64 * 2**20, "warning"), (8 * GIB, 2**20, "problem"), (8 * GIB, GIB // 2, "warning"),
     (8 * GIB, 8 * GIB, "ok")],
)  # fmt: skip
def test_little_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, total: int, free: int, verdict: str) -> None:
    monkeypatch.setattr(machine, "SHARED", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(total, total - free, free))
    found = only(machine.shared_memory(ExaminationRequest()))
    assert found.verdict == verdict
    assert ("--shm-size" in (found.remedy or "")) == (verdict != "ok")


def test_swapped_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=3 * GIB))
    found = only(machine.swap(ExaminationRequest()))
    assert found.verdict == "warning"
    assert found.values["used_bytes"] == 3 * GIB


@pytest.mark.parametrize(("soft", "verdict"), [(100, "problem"), (1024, "warning"), (65536, "ok"), (-1, "ok")])
def test_a_low_limit_of_open_files_is_found(monkeypatch: pytest.MonkeyPatch, soft: int, verdict: str) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (soft, 65536))
    assert only(machine.open_files(ExaminationRequest())).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(2**20, "problem"), (GIB, "warning"), (100 * GIB, "ok")])
def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, verdict: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(100 * GIB, 0, free))
    runs, temporary = machine.disks(ExaminationRequest(folder=tmp_path / "not" / "yet"))
    assert (runs.verdict, temporary.verdict) == (verdict, verdict)


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runs, _ = machine.disks(ExaminationRequest(folder=tmp_path / "file" / "runs"))
    assert runs.verdict == "problem"
    assert f"{tmp_path / 'file'} is a file" in runs.text
    if Path("/proc/sys").is_dir():  # where nobody can make a file, root neither
        runs, _ = machine.disks(ExaminationRequest(folder=Path("/proc/sys/runs")))
        assert runs.verdict == "problem"


def test_missing_and_old_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "torch>=999",
        "no-such-package>=1",
        'no-such-engine>=1; extra == "wished"',
        'torch>=998; extra == "old"',
        'torch; extra == "there"',
        'no-such-tool; extra == "dev"',
    ]
    monkeypatch.setattr(machine, "requires", lambda name: wanted)
    found = list(machine.packages(ExaminationRequest()))
    assert [(each.subject, each.verdict) for each in found] == [
        ("packages", "problem"),
        ("extra old", "warning"),
        ("extra there", "ok"),
        ("extra wished", "ok"),
    ]
    assert f"torch is {version('torch')}, and >=999 is wanted; no-such-package is not installed" in found[0].text
    assert found[3].remedy == 'to have it: pip install --upgrade "samestep[wished]"'


def test_without_packaging_no_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda package: package != "packaging")
    finding = only(machine.packages(ExaminationRequest()))
    assert (finding.verdict, finding.remedy) == ("warning", "pip install packaging")
    assert finding.text == "packaging is not installed, so no versions were compared"


def test_an_engine_without_its_package_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda package: False)
    of = {each.subject: each for each in machine.engines(ExaminationRequest())}
    assert of["engine native"].text == "can be used"
    assert of["engine deepspeed"].text == "deepspeed not installed"
    assert "pip install 'samestep[deepspeed]'" in (of["engine deepspeed"].remedy or "")
