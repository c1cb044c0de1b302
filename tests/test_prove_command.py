"""`samestep-prove`: the proof of a script by the prover alone, whose ranks torchrun starts."""

import json
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.script_proof import command
from samestep.script_proof.compare import prove
from samestep.script_proof.runs import ScriptProof
from samestep.script_proof.torchrun import by_torchrun

ZOO = Path(__file__).resolve().parent.parent / "zoo"

FAILING = """
import os
import sys
import time

print("begins", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("rank 1 has no such file")
if os.environ["WORLD_SIZE"] == "2":
    time.sleep(60)
import torch

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    (weight * torch.ones(2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_of_a_failed_run_the_rank_that_failed_first_is_told_without_torchruns_own_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING, encoding="utf-8")
    with pytest.raises(UserError) as told:
        prove(ScriptProof(script=(str(script),), device="cpu", time_limit=60), tmp_path / "runs", by_torchrun)
    lines = str(told.value).splitlines()
    assert lines[0] == f"{script} with 2 processes failed:"
    assert lines[-1] == "ValueError: rank 1 has no such file"
    assert "torch/distributed" not in str(told.value)
    assert "runner.py" not in str(told.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind"), [("fault_allreduce_sum", "summed"), ("right_ddp", None)])
def test_scripts_of_the_zoo_are_judged_by_torchruns_ranks(name: str, kind: str | None, tmp_path: Path) -> None:
    verdict = prove(ScriptProof(script=(str(ZOO / f"{name}.py"),), device="cpu"), tmp_path / "runs", by_torchrun)
    assert verdict.to_json()["kind"] == kind


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], 'samestep-prove needs a command, such as "train.py --batch-size 16", or --spot-checks FOLDER'),
        (["nowhere.py"], "COMMAND nowhere.py: there is no such script in "),
        (["train.py", "--processes", "1"], "--processes is '1'; a whole number from 2"),
        (
            ["train.py", "--alone-processes", "2"],
            "--alone-processes 2: the split run has 2, which are compared with fewer",
        ),
        (["train.py", "--engine", "torch"], "unrecognized arguments: --engine torch; "),
        (["train.py", "--dtype", "int8"], "--dtype int8: use float64, float32, bfloat16 or float16"),
        (["train.py", "--keep", "."], "--keep .: it is there already; name a new folder"),
        (["train.py", "--json", "."], "--json .: this is a folder"),
        (["train.py", "--progress", "often"], "often"),
    ],
)
def test_a_mistake_is_one_message_before_anything_starts(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("samestep-prove: ")
    assert message in printed.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_writes_what_verify_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ZOO)
    file = tmp_path / "verdict.json"
    assert command.main(["fault_allreduce_sum.py", "--device", "cpu", "--json", str(file)]) == 1
    assert json.loads(file.read_text(encoding="utf-8"))["kind"] == "summed"
    assert "NOT the same step: step 1, gradient" in capsys.readouterr().out
