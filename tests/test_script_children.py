"""Scripts that start their ranks themselves, as with `torch.multiprocessing.spawn`."""

from pathlib import Path

import pytest

from samestep.script_proof.compare import prove
from samestep.script_proof.forked import forking
from samestep.script_proof.runs import ScriptProof
from samestep.script_proof.torchrun import by_torchrun

SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import init_process_group


def train(rank, count, store):
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    COUNT
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    rows, classes = torch.randn(4, 8, 8, generator=generator), torch.randint(0, 3, (4, 8), generator=generator)
    for x, y in zip(rows, classes):
        share = slice(rank * 8 // count, (rank + 1) * 8 // count)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= DIVISOR
        optimizer.step()


if __name__ == "__main__":
    count = 2
    import tempfile

    store = tempfile.mktemp()
    START
"""
SPAWN = "mp.spawn(train, args=(count, store), nprocs=count)"
FORKS = """start = mp.get_context("fork").Process
    processes = [start(target=train, args=(rank, count, store)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0"""


def written(start: str, divisor: str) -> str:
    """The script; where each process is started by itself, it counts ranks by the process group."""
    count = "count = dist.get_world_size()" if start == FORKS else "pass"
    return SCRIPT.replace("START", start).replace("DIVISOR", divisor).replace("COUNT", count)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("start", "divisor", "kind", "argument"),
    [
        (SPAWN, "count", None, True),
        (SPAWN, "1", "summed", True),
        (FORKS, "count", None, False),
    ],
)
def test_ranks_that_a_script_starts_are_compared_with_one(
    tmp_path: Path, start: str, divisor: str, kind: str | None, argument: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(written(start, divisor), encoding="utf-8")
    on = "cpu" if divisor == "1" else None  # replaced devices go with the ranks as well
    proof = ScriptProof(script=(str(script),), device="cpu", on=on, steps=3, time_limit=120)
    with forking(proof, by_torchrun) as starter:
        verdict = prove(proof, tmp_path / "runs", starter)
    assert verdict.to_json()["kind"] == kind
    assert verdict.processes == 2
    notes = [note.en for note in verdict.notes]
    assert "the script starts its ranks itself: 2 in the split run" in notes
    assert any("the argument of its function that is 2 was 1" in note for note in notes) is argument
