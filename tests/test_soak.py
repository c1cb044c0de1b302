"""`samestep drill --soak`: random faults over one ordered job, whose bits are those of an undisturbed run."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from samestep import jobfile
from samestep.cli.main import main
from samestep.drill import under_faults
from samestep.drill.disturbances import KINDS, Processes, Target, kinds_of, last_step_in
from samestep.drill.drill import FinishedRun
from samestep.drill.soak import SoakReport, SoakSettings, _samples, soak, soaked_job
from samestep.drill.under_faults import Planned, UnderFaults, planned
from samestep.job import Fault, Job

TESTS = Path(__file__).parent
JOB = f"""
recipe: {{task: {TESTS}/small_tasks.py:Slow, args: {{seconds: 0.02}}, batch: 16, virtual_ranks: 2}}
run: {{layout: dp2, threads: 1}}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(JOB, encoding="utf-8")
    return str(file)


def soaked(job: str, *words: str, limit: float) -> dict[str, Any]:
    file = Path(job).with_suffix(".json")
    command = [sys.executable, "-m", "samestep", "drill", job, "--json", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "survived" in done.stdout
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_rank_that_raises_leaves_the_bits_as_they_are(job: str) -> None:
    words = ["--soak", "1", "--between", "0.3s", "--steps", "60", "--layout", "single", "--faults", "raise"]
    found = soaked(job, *words, limit=380)
    assert found["faults"] == {"raise": 1}
    assert found["passed"]
    assert found["median_recovery"] > 0


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_few_faults_leave_the_bits_as_they_are(job: str) -> None:
    words = ["--soak", "3", "--seed", "3", "--between", "1s", "--steps", "400", "--layout", "single"]
    words += ["--faults", "kill, terminate, gone"]
    found = soaked(job, *words, limit=380)
    assert sum(found["faults"].values()) == 3
    known = {name: found[name] for name in ("same_weights", "same_losses", "samples_lost", "samples_repeated")}
    assert known == {"same_weights": True, "same_losses": True, "samples_lost": 0, "samples_repeated": 0}
    assert (found["left_processes"], found["left_files"]) == (0, 0)
    assert 0 < found["goodput"] < 1.5
    assert found["slowest_recovery"] >= found["median_recovery"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_fault_leaves_the_bits_as_they_are(job: str) -> None:
    found = soaked(job, "--soak", "12", "--seed", "5", "--between", "2s", "--steps", "1500", limit=880)
    assert found["passed"]
    assert len(found["faults"]) > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_faults_leave_the_bits_as_they_are(job: str) -> None:
    found = soaked(job, "--soak", "200", "--seed", "7", "--between", "0.3s", limit=3580)
    assert found["passed"]
    assert sum(found["faults"].values()) == 200
    assert sorted(found["faults"]) == sorted(kinds_of(None, ranks=2))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--soak", "0"], 'argument --soak: "0" is out of range; use a whole number from 1 to 1,000'),
        (["--soak", "2", "--between", "soon"], '--between: "soon" is no time; use seconds above 0'),
        (["--soak", "2", "--between", "0"], '--between: "0" is no time; use seconds above 0'),
        (["--soak", "2", "--steps", "3"], "--steps is 3; it must be a whole number from 8 to 1,000,000,000"),
        (["--soak", "2", "--faults", "kil"], 'unknown fault "kil" of a soak; did you mean "kill"'),
        (["--soak", "2", "--time-limit", "0"], '--time-limit: "0" is no time; use seconds above 0'),
        (["--soak", "2", "--layout", "tp2"], 'layout "tp2": run.reduction is ordered, which is for data ranks'),
        (
            ["--soak", "2", "--faults", "cable"],
            'fault "cable" of a soak wants several hosts, and drill starts one; use',
        ),
        (
            ["--soak", "2", "--faults", "abort", "--layout", "single"],
            'fault "abort" of a soak wants 2 processes; use layout dp2',
        ),
        (["--seed", "2"], "--seed is of a soak; use it with --soak N"),
        (["--between", "2s"], "--between is of a soak; use it with --soak N"),
    ],
)
def test_what_is_wrong_is_told(job: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", job, *words]) == 2
    assert told in capsys.readouterr().err


def left(folder: Path, steps: list[int]) -> FinishedRun:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": 1.0, "samples": 16}) for step in steps]
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return FinishedRun(code=0, output="", folder=folder)


@pytest.mark.quick
def test_lost_and_repeated_samples_are_counted(tmp_path: Path) -> None:
    whole = left(tmp_path / "whole", [0, 1, 2, 3])
    assert _samples(whole, left(tmp_path / "same", [0, 1, 2, 3])) == (0, 0)
    assert _samples(whole, left(tmp_path / "other", [0, 1, 1, 1, 3])) == (16, 32)


RIGHT = SoakReport(
    layout="dp2",
    steps=8,
    seed=0,
    between=1.0,
    wanted=2,
    faults={"kill": 2},
    ended=True,
    same_weights=True,
    same_losses=True,
    samples_lost=0,
    samples_repeated=0,
    goodput=0.5,
    slowest_recovery=1.0,
    median_recovery=1.0,
    left_processes=0,
    left_files=0,
    last_words="",
)


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong",
    [
        {"faults": {"kill": 1}},
        {"ended": False},
        {"same_weights": False},
        {"same_losses": False},
        {"samples_lost": 16},
        {"samples_repeated": 16},
        {"left_processes": 1},
        {"left_files": 1},
    ],
)
def test_a_soak_passes_only_where_nothing_is_lost_or_left(wrong: dict[str, Any]) -> None:
    assert RIGHT.passed
    assert not replace(RIGHT, **wrong).passed


def test_a_process_and_its_children_are_one_target() -> None:
    text = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with subprocess.Popen([sys.executable, "-c", text]) as started:
        target = Processes(started, Path("none"), 2)
        until = time.monotonic() + 30
        while len(target.tree()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(target.tree()) == 2
        assert target.ranks() == {}
        assert target.last_step() == -1
        assert KINDS["kill"].commit(target, random.Random(0)) is None  # nobody is a rank yet
        assert KINDS["gone"].commit(target, random.Random(0)) is not None
        assert started.wait(30) == -9


@pytest.mark.quick
def test_the_faults_of_a_seed_are_the_same_ones_and_as_far_apart_as_asked() -> None:
    kinds = kinds_of(None, ranks=2)
    plan = planned(kinds, faults=2000, between=4.0, seed=9)
    assert plan == planned(kinds, faults=2000, between=4.0, seed=9)
    assert plan != planned(kinds, faults=2000, between=4.0, seed=10)
    waits = [fault.wait for fault in plan]
    assert 2.0 <= min(waits) < 2.1 < 5.9 < max(waits) <= 6.0
    assert sum(waits) / len(waits) == pytest.approx(4.0, rel=0.03)
    assert {fault.kind for fault in plan} == {name for name, kind in KINDS.items() if not kind.of_hosts}
    assert set(kinds_of(None, ranks=2, hosts=True)) == set(KINDS)


@pytest.mark.quick
def test_the_last_step_of_a_long_record_is_read_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_step_in(file) == -1
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(3000)]
    file.write_text("\n".join(lines) + '\n{"step": 3', encoding="utf-8")
    assert last_step_in(file) == 2999


@dataclass
class Told:
    """A job that does what a list says: at each look the step that it has come to, then its exit code."""

    steps: Sequence[int]
    code: int | None = 0
    hosts: None = None
    looks: int = 0
    got: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        over = self.looks >= len(self.steps) or "kill" in self.got
        return (-9 if "kill" in self.got else self.code) if over else None

    def last_step(self) -> int:
        self.looks += 1
        return self.steps[min(self.looks, len(self.steps)) - 1]

    def ranks(self) -> Mapping[int, int]:
        return {}

    def fault_file(self, rank: int, fault: Fault) -> Path:
        raise AssertionError

    def tree(self) -> Sequence[int]:
        return []

    def terminate(self) -> None:
        self.got.append("terminate")

    def kill_supervisor(self) -> None:
        self.got.append("kill supervisor")

    def kill(self) -> None:
        self.got.append("kill")


# A training of a sum in steps of 5 ms, each recorded, which goes on from its record; one may do so in a wrong way.
TRAINING = """
import json, signal, sys, time
from pathlib import Path
folder, steps, faulty = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(exist_ok=True)
record, raises = folder / "metrics.jsonl", folder.with_name(folder.name + "-raise-0")
done = record.read_text().splitlines() if record.exists() else []
if done and not done[-1].endswith("}"):
    record.write_text("".join(line + "\\n" for line in done[:-1]))
    done = done[:-1]
if done and faulty == "loses a step":
    done.append(done[-1])
if done and faulty == "takes a step again":
    done.pop()
total = json.loads(done[-1])["loss"] if done else 1.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with record.open("a", buffering=1) as file:
    for step in range(len(done), steps):
        if raises.exists():
            raises.unlink()
        time.sleep(0.005)
        total = total * 1.01 % 7
        times = {"step_seconds": 0.005, "data_seconds": 0.0}
        file.write(json.dumps({"step": step, "loss": total, "samples": 16, **times}) + "\\n")
(folder / "model.safetensors").write_text(repr(total))
"""


class OwnRank(Processes):
    """A job that is its only rank."""

    def ranks(self) -> Mapping[int, int]:
        return {0: self.started.pid} if self.last_step() >= 0 else {}


@dataclass(frozen=True)
class Scripts:
    """A place that trains by a script, in a moment."""

    place: Path
    faulty: str

    def train(self, name: str, job: Job, watch: Callable[[Target], None]) -> FinishedRun:
        words = [str(self.folder(name)), str(job.recipe.steps), self.faulty]
        with subprocess.Popen([sys.executable, "-S", "-c", TRAINING, *words]) as started:
            watch(OwnRank(started, self.folder(name), 1))
            code = started.wait(60)
        return FinishedRun(code=code, output="", folder=self.folder(name))

    def folder(self, name: str) -> Path:
        return self.place / name

    def left_files(self) -> set[Path]:
        return set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faulty", "wrong"),
    [
        ("", {"passed": True}),
        ("loses a step", {"passed": False, "same_weights": False, "samples_repeated": 0}),
        pytest.param(
            "takes a step again",
            {"passed": False, "same_losses": False, "samples_lost": 0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_training_loses_or_repeats_is_found(
    faulty: str, wrong: dict[str, Any], job: str, tmp_path: Path
) -> None:
    kinds = ["terminate", "gone", "pause", "raise"]
    settings = SoakSettings(faults=4, kinds=kinds, seed=5, between=0.15, steps=250)
    loaded = jobfile.load(Path(job), [("run.layout", "single", "test")]).job
    found = soak(Scripts(tmp_path, faulty), soaked_job(loaded, 4), settings)
    assert (found.ended, sum(found.faults.values()), found.left_processes) == (True, 4, 0)
    assert set(found.faults) == set(kinds)
    assert wrong.items() <= found.to_json().items()
    assert len(found.recoveries) > 1
    assert 0 < found.goodput < 1


@pytest.mark.quick
def test_steps_under_way_are_no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_faults, "_LOOKS", 0.0)
    soak = UnderFaults(plan=[Planned(kind="terminate", wait=1e-9, chance=0)], stuck_after=60)
    first = Told([-1, 5, 5, 6, 7, 20], code=143)  # goes on for some steps until it has ended
    soak.disturb(first)
    assert (first.got, soak.recoveries, soak.goes_on(143)) == (["terminate"], [], True)
    before = time.monotonic()
    soak.disturb(Told([20, 20, 21, 23]))
    assert len(soak.recoveries) == 1  # its good end counts
    assert soak.recoveries[0] >= time.monotonic() - before - 0.1
    assert not soak.goes_on(0)
    again = UnderFaults(plan=[Planned(kind="terminate", wait=1e-9, chance=0)], stuck_after=60)
    again.disturb(Told([-1, 5, 5, 6], code=143))
    again.disturb(Told([6, 4, 9, 10, 10], code=1))
    assert len(again.recoveries) == 1  # step 10 is beyond what may still have been under way


@pytest.mark.quick
def test_a_job_without_steps_is_given_up() -> None:
    soak = UnderFaults(plan=[], stuck_after=0.2)
    stuck = Told([3] * 1000)
    soak.disturb(stuck)
    assert (soak.stuck, stuck.got) == (True, ["kill"])
    assert not soak.goes_on(-9)
