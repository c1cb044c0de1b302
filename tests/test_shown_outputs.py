"""Outputs that the documentation shows and what the program prints: all but their numbers is the same."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from shown_pages import ROOT, masked, outputs

import samestep
from samestep.cli.main import main
from samestep.contract.check import examine
from samestep.display.proofs import print_bits, print_proof
from samestep.display.results import print_profile
from samestep.engines.horovod import HorovodSettings
from samestep.engines.parameter_server.settings import ParameterServerSettings
from samestep.job import Job, Run
from samestep.job_check import LAYOUTS, CheckResult, print_checked
from samestep.launch.environments.hostfile import read_hostfile
from samestep.layout import Layout
from samestep.profiling.breakdown import CATEGORIES, Profile, RankProfile
from samestep.script_proof.kinds import Finding
from samestep.tasks.registry import resolve
from samestep.training.as_built import AsBuilt
from samestep.training.nonfinite_values import BOTH, NonFiniteValue
from samestep.tuning.results import Timing, TuningResult, TuningRow, print_tuned
from samestep.verification.bits import BitsRow
from samestep.verification.proof import Proof

pytestmark = pytest.mark.quick

HOME = "docs/README.md"
RUN = "docs/run.md"
OWN = "docs/own-tasks.md"
CONTRACT = "docs/contract.md"
PROMISE = "docs/promise.md"
PROFILE = "docs/profile.md"
BITS = "docs/to-the-bit.md"
TRANSLATE = "docs/translate.md"
PLACES = "docs/places.md"

AS_BUILT = AsBuilt(
    max_relative_difference={"loss": 1e-8, "grad_norm": 1e-8, "gradients": 1.38e-6}, worst_parameter="0.weight"
)


def the_output(page: str, words: str) -> str:
    """The one block of a page whose first line has these words."""
    (found,) = [output for output in outputs(page) if words in output.partition("\n")[0]]
    return found


def proof(**values: Any) -> Proof:
    differences = {"loss": 1.26e-16, "grad_norm": 2.58e-16, "parameters": 5.2e-15, "metrics": 0.0}
    usual = {"layout": "dp2", "dtype": "float64", "steps": 5, "max_relative_difference": differences}
    usual |= {"by_step": {"loss": [1.26e-16] * 5, "grad_norm": [2.58e-16] * 5}, "as_built": AS_BUILT}
    return Proof(**{**usual, "tolerance": 1e-10, "worst_parameter": "0.weight", **values})


@pytest.mark.parametrize("page", [HOME, OWN, PROMISE])
def test_a_proof_is_printed_as_shown(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = [output for output in outputs(page) if re.match(r"dp\d (takes|does NOT take) the same step", output)]
    (worst,) = re.findall(r"worst parameter: (.*)", shown)
    loss = 1.0 if page == PROMISE else 1e-16  # that one is of a mistake
    differences = {**proof().max_relative_difference, "loss": loss}
    print_proof(proof(layout="dp3", max_relative_difference=differences, worst_parameter=worst))
    assert masked(capsys.readouterr().out) == masked(shown)


def test_what_is_not_finite_is_printed_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = NonFiniteValue(side=BOTH, kind="NaN", what="gradient norm", step=4, name="2.bias")
    print_proof(proof(nonfinite=[found]))
    printed = capsys.readouterr().out
    verdict, behind = printed.partition("\n")[0], printed.partition("┘\n")[2]
    assert masked(f"{verdict}\n{behind}") == masked(the_output(PROMISE, "NaN: "))


def test_the_first_difference_is_printed_as_shown() -> None:
    summed = Finding(kind="summed", step=1, what="gradient", relative=1.0, facts={"ratio": 2.0, "by": 2})
    assert f"first difference: {summed.line}\n" == the_output(PROMISE, "first difference")


def test_a_proof_in_json_has_the_keys_that_are_shown() -> None:
    shown, written = json.loads(the_output(PROMISE, "{")), proof().to_json()
    assert shapes(shown) == shapes(json.loads(json.dumps(written)))


def shapes(value: Any) -> Any:
    """A value of JSON with only its keys and kinds."""
    return {key: shapes(each) for key, each in value.items()} if isinstance(value, dict) else type(value).__name__


def test_a_proof_to_the_bit_is_printed_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = the_output(BITS, "bits versus one process")
    compared: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("losses", "gradient norms", "parameters", "optimizer state", "metrics"), ()
    )
    layouts = re.findall(r"│ (\S+) +│ same bits", shown)
    print_bits(
        [
            BitsRow(layout=each, steps=12, differs=compared, ordered_seconds=0.25, fast_seconds=0.125)
            for each in layouts
        ]
    )
    assert masked(capsys.readouterr().out) == masked(shown)


def test_a_profile_is_printed_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = tuple(
        RankProfile(
            rank=rank,
            seconds=0.5164,
            own_seconds=0.4,
            categories=dict.fromkeys(CATEGORIES, 0.1),
            overlapped=0.0408,
            phases={},
            typical={},
        )
        for rank in range(2)
    )
    folder = Path("runs/language/profile")
    print_profile(
        Profile(layout="dp2", steps=(4, 5, 6, 7, 8), ranks=ranks, straggler=None, usual_seconds=0.45, folder=folder)
    )
    assert masked(capsys.readouterr().out) == masked(the_output(PROFILE, "where a step's time goes"))


def test_a_tuned_job_is_printed_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = Timing(repeats=(0.02, 0.021)), Timing(repeats=(0.014, 0.0145))
    missing = {name: f"lib{name} is not installed" for name in ("jemalloc", "tcmalloc")}
    rows = [
        TuningRow(setting="micro_batch", value="16", status="kept", timing=fast, before=slow),
        TuningRow(setting="micro_batch", value="8", status="not better", timing=slow, before=fast),
        *(
            TuningRow(setting="allocator", value=name, status="not installed", reason=reason)
            for name, reason in missing.items()
        ),
        TuningRow(setting="precision", value="bf16", status="changes the result", timing=slow, before=fast),
    ]
    job = Job(recipe=samestep.Recipe(task="regression", batch=64), run=Run(layout="dp2", micro_batch=16))
    print_tuned(TuningResult(job=job, at_first=slow, at_last=fast, rows=rows))
    assert masked(capsys.readouterr().out) == masked(the_output(PROFILE, "ms of a step"))


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_values_are_printed_with_their_origin(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--layout", "dp4", "--set", "recipe.optimizer.lr=1e-3", "--print-config"]
    assert main(["train", "examples/regression.yaml", *given]) == 0
    assert capsys.readouterr().out == the_output(RUN, "recipe:")


def test_a_translation_is_printed_as_shown(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "examples/translate/ds_config.json"]) == 0
    assert capsys.readouterr().out == the_output(TRANSLATE, "# Translated from")


@pytest.mark.processes
def test_a_training_prints_and_writes_what_is_shown(in_a_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "examples/regression.yaml", "--layout", "dp2"]) == 0
    assert masked(capfd.readouterr().out) == masked(the_output(RUN, "rank 0: 64 steps"))
    written = (in_a_folder / "runs" / "regression" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert shapes(json.loads(written)) == shapes(json.loads(the_output(RUN, '{"step": 1')))


@pytest.mark.processes
@pytest.mark.slow  # the same path as above
def test_a_training_of_ones_own_task_prints_what_is_shown(
    in_a_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "examples/own_task.yaml"]) == 0
    assert masked(capfd.readouterr().out) == masked(the_output(OWN, "┌────────────┬"))


def test_a_contract_that_is_kept_is_printed_as_shown(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = the_output(CONTRACT, "the contract of own_task")
    job, task = job_of("examples/own_task.py:Spirals")
    print_checked(CheckResult(job="own_task", contract=examine(job, Layout(), task), layouts=()))
    contract, layouts = masked(shown).split("\nlayouts,")
    assert contract == masked(capsys.readouterr().out).partition("\nlayouts,")[0]
    assert [masked(each) for each in LAYOUTS] == re.findall(r"^│ (.*?) │ (?:same|refused)", layouts, re.MULTILINE)


def job_of(task: str) -> tuple[Job, samestep.Task]:
    recipe = samestep.Recipe(task=task, batch=64, steps=2)
    return Job(recipe=recipe), resolve(recipe)


MEAN = '''"""The points of own_task, with a mean in the loss."""

import torch
from own_task import Spirals


class Mean(Spirals):
    def loss(self, output, batch):
        return torch.nn.functional.cross_entropy(output, batch.targets), len(output)
'''


def test_a_broken_contract_is_printed_as_shown(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    (in_a_folder / "mean_task.py").write_text(MEAN, encoding="utf-8")
    (in_a_folder / "mean.yaml").write_text("recipe: {task: 'mean_task.py:Mean', batch: 64, steps: 2}\n", "utf-8")
    assert main(["check", "mean.yaml"]) == 1
    assert masked(capsys.readouterr().out) == masked(the_output(CONTRACT, "the contract of mean"))


@pytest.mark.parametrize(
    ("page", "first", "settings"),
    [
        ("docs/parameter-server.md", "servers: 2", ParameterServerSettings),
        ("docs/engines/horovod.md", "compression: fp16", HorovodSettings),
    ],
)
def test_every_setting_of_an_engine_is_shown(page: str, first: str, settings: type) -> None:
    values = yaml.safe_load(the_output(page, first))
    assert list(values) == [field.name for field in fields(settings)]
    settings(**values)  # they can be given


def test_a_hostfile_is_read_as_shown(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(the_output(PLACES, "# DeepSpeed"), encoding="utf-8")
    hosts, _ = read_hostfile(file)
    assert [(host.name, host.slots) for host in hosts] == [
        ("worker-1", 4),
        ("worker-2", 4),
        ("worker-3", 4),
        ("fd00::7", 2),
    ]
