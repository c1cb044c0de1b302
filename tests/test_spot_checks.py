"""Every k-th step of a real training is recorded, and judged afterwards: planted faults, and right trainings."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from spot_checked import TRAININGS, train_all, train_unevenly
from torch import nn

from samestep.cli.main import main
from samestep.errors import UserError
from samestep.launch import local
from samestep.script_proof import command
from samestep.spot_checks.fingerprints import Projection, fingerprint, mean_of
from samestep.spot_checks.judgement import SpotVerdict, judge
from samestep_prove import SpotChecks

# The kinds of what is wrong, or words of a note where a training may be right.
EXPECTED = {
    "scaled otherwise": "note: all gradients are 0.3 times",
    "equal draws": "note: the random generators of all ranks",
    "unlike targets": "note: ranks have different numbers of targets (1 != -100: 7, 6",
    "summed": "summed",
    "summed by hand": "summed",
    "divided twice": "divided-twice",
    "shares, averaged": "divided-twice",
    "not reduced": "not-reduced",
    "a parameter is ignored": "parameter-not-reduced",
    "weights of each rank's own": "weights-not-broadcast",
    "weights are changed": "weights-drift",
    "rates of each rank's own": "learning-rate-differs",
    "decay of each rank's own": "settings-differ",
    "the same rows": "same-samples",
    "batch norm": "local-batch-statistics",
}


@pytest.fixture(scope="module", params=[2, 3])
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpotVerdict]:
    folder = tmp_path_factory.mktemp("spot-checks")
    local.start(train_all, (folder,), request.param)
    return {name: judge(folder / str(number)) for number, name in enumerate(TRAININGS)}


def test_trainings_are_judged_by_what_their_ranks_noted(verdicts: dict[str, SpotVerdict]) -> None:
    for name, verdict in verdicts.items():
        assert verdict.steps == 3, name
        notes = [f"note: {note.en}" for note in verdict.notes]
        kind = verdict.findings[0].kind if verdict.findings else None
        expected = EXPECTED.get(name)
        if expected is None:
            assert (kind, notes) == (None, []), name
        elif expected.startswith("note"):
            assert kind is None, name
            assert [note.startswith(expected) for note in notes] == [True], (name, notes)
        else:
            assert kind == expected, name


def test_a_finding_names_the_step_and_the_parameter(verdicts: dict[str, SpotVerdict]) -> None:
    ignored = verdicts["a parameter is ignored"].findings[0]
    assert (ignored.step, ignored.module) == (1, "2.weight")
    changed = verdicts["weights are changed"].findings[0]
    assert (changed.step, changed.module) == (7, "0.weight")
    assert verdicts["frozen"].right


def test_steps_that_some_rank_lacks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local.start(train_unevenly, (tmp_path / "checks",), 2)
    file = tmp_path / "checks" / "rank-1.jsonl"
    file.write_text(file.read_text() + '{"start": 1, "st')  # cut off as it was written
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--spot-checks", "checks", "--json", "said.json"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        "5 steps recorded by 2 ranks: NOT the step of one process\nstep 1, gradient: no gradient is"
    )
    assert "note: step 7 was recorded by 1 of 2 ranks (not by 1)" in printed
    written = json.loads((tmp_path / "said.json").read_text())
    assert (written["right"], written["steps"], written["findings"][0]["kind"]) == (False, 5, "not-reduced")
    assert command.main(["--spot-checks", "checks"]) == 1  # where the prover alone is installed
    assert capsys.readouterr().out == printed


def test_a_fingerprint_is_linear_and_sees_where_a_number_stands() -> None:
    generator = torch.Generator().manual_seed(3)
    projection = Projection(torch.device("cpu"))
    a, b = (torch.randn(70_000, generator=generator, dtype=torch.float64) for _ in range(2))
    of_a, of_b = (fingerprint(projection.of(tensor)) for tensor in (a, b))
    mean = fingerprint(projection.of((a + b) / 2))
    assert mean.distance(mean_of([of_a, of_b])) < 1e-14
    assert math.isclose(of_a.norm, a.norm().item(), rel_tol=1e-12)
    # An estimate of the true distance from four random directions, which is within a factor of a few.
    true = ((a - b).norm() / max(a.norm(), b.norm())).item()
    assert true / 8 < of_a.distance(of_b) < 8 * true
    swapped = torch.cat([a[1 << 14 : 1 << 15], a[: 1 << 14], a[1 << 15 :]])
    assert fingerprint(projection.of(swapped)).distance(of_a) > 0.01
    assert fingerprint(projection.of(torch.zeros(5))).distance(fingerprint(projection.of(torch.zeros(5)))) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--spot-checks", "nowhere"], "--spot-checks nowhere: there is no such folder"),
        (["--spot-checks", "empty"], r"--spot-checks empty: there are no records \(rank-0.jsonl and so on\)"),
        (["--spot-checks", "alone"], "--spot-checks alone: one rank trained"),
        (["--spot-checks", "broken"], "rank-0.jsonl:1: this is no record of a step; remove the file"),
        (["--spot-checks", "alone", "--report", "page.html"], "--report: spot checks have no page"),
        (["job.yaml", "--spot-checks", "alone"], "--spot-checks judges what was recorded, and runs nothing"),
        (["--spot-checks", "alone", "--layout", "dp2"], "--spot-checks judges what was recorded, and runs nothing"),
        (["--spot-checks", "alone", "--seed", "1"], "--spot-checks judges what was recorded, and runs nothing"),
    ],
)
def test_what_can_not_be_judged_is_said(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "rank-0.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = SpotChecks("alone", model, optimizer)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    checks.close()
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error


def test_what_it_is_given_wrongly_is_said(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("the optimizer has no parameter of this model", optimizer, {}),
        ("this is no optimizer of torch.optim", object(), {}),
        ("a step in how many is recorded", optimizer, {"every": 0}),
        ('use "mean", or "sum"', optimizer, {"reduction": "product"}),
    ]
    for said, given, options in cases:
        with pytest.raises(UserError, match=said):
            SpotChecks(tmp_path, model, given, **options)


TRAINER = """
    import sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from samestep_prove import trainer_callback

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    rows = [{"input_ids": (words := torch.randint(0, 64, (12,))), "labels": words} for _ in range(32)]
    options = TrainingArguments(
        "out", max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, max_grad_norm=0.5,
    )
    callback = trainer_callback("checks", every=2)
    Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), options, train_dataset=rows, callbacks=[callback]).train()
"""


@pytest.mark.slow
def test_a_trainer_records_by_a_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(dedent(TRAINER))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(torchrun, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=170)
    assert ended.returncode == 0
    verdict = judge(tmp_path / "checks")
    assert (verdict.steps, verdict.ranks, verdict.findings) == (3, 2, [])


@pytest.mark.slow
def test_steps_between_the_recorded_ones_cost_nothing(tmp_path: Path) -> None:
    """Below 1 % with every=100: what a recorded step takes more, by a hundred; of a model with 6 million numbers."""
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(256, 768)

    def seconds() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    plain = sorted(seconds() for _ in range(15))[7]
    checks = SpotChecks(tmp_path, model, optimizer, every=1)
    recorded = sorted(seconds() for _ in range(15))[7]
    checks.close()
    assert (recorded - plain) / 100 < 0.01 * plain, (recorded, plain)
