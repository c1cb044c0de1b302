"""Who may start what: hosts that a job leaves out, launches inside a launcher, and hosts of which few are taken."""

import os
from pathlib import Path
from typing import Any

import pytest
from launching import TOLD

from samestep.cli.main import main
from samestep.cluster.discover.place import Given
from samestep.cluster.discover.resolve import find
from samestep.cluster.filters import Filters, apply
from samestep.cluster.start.launch import Wanted, part_here


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two containers, which all run the same command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SM_HOSTS", '["algo-1","algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    monkeypatch.setenv("SM_NUM_CPUS", "1")


@pytest.mark.usefixtures("container")
@pytest.mark.parametrize(
    "words", [["--num-nodes", "1"], ["--include", "algo-1"], ["--exclude", "algo-2"], ["--nodes", "1"]]
)
def test_a_host_that_is_left_out_does_not_do_the_job_too(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "--", TOLD, "tell"]) == 2
    out, err = capfd.readouterr()
    assert "is none of the job's: algo-1; leave it out of the start" in err
    assert out == ""


def wanted(**more: Any) -> Wanted:
    return Wanted(command=("train.py",), remote_python=("python",), folder=".", **more)


@pytest.mark.usefixtures("container")
def test_the_host_that_is_left_does_the_job() -> None:
    found = apply(find(Given(environ=os.environ)), Filters(include="algo-2"), {})
    part = part_here(found, wanted())
    assert part is not None
    assert (part.host, part.node_rank, part.most, part.address) == ("algo-2", 0, 1, None)
