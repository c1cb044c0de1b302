"""`samestep hosts`: what was found, what each rank gets, which groups cross hosts; wrong input."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from samestep.cli.main import main
from samestep.launch.environments.base import PlaceInputs
from samestep.launch.environments.registry import PLACES

pytestmark = pytest.mark.quick

# What the places say shows them.
VARIABLES = [name for place in PLACES for name in re.findall(r"[A-Z][A-Z_]+", place.sign)]


@pytest.fixture(autouse=True)
def nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No place but this machine, wherever the tests run."""
    for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    left = PlaceInputs(environ=os.environ)
    assert [place.name for place in PLACES if place.there(left)] == ["this-machine"]
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n", encoding="utf-8")
    return tmp_path / "hosts"


@pytest.fixture
def shown(tmp_path: Path) -> Any:
    """What the command writes for a program."""

    def show(*words: str) -> dict[str, Any]:
        assert main(["hosts", *words, "--json", str(tmp_path / "shown.json")]) == 0
        return json.loads((tmp_path / "shown.json").read_text(encoding="utf-8"))

    return show


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["hosts", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_this_machine(shown: Any) -> None:
    found = shown("--num-procs", "3")
    assert (found["place"], found["this"], found["world_size"]) == ("this-machine", 0, 3)
    assert [rank["local_rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert all(rank["cores"] for rank in found["ranks"])


def test_cores_of_other_hosts_are_not_known(shown: Any, hostfile: Path) -> None:
    assert {rank["cores"] for rank in shown("--hostfile", str(hostfile))["ranks"]} == {None}


def test_every_rank_has_its_place(shown: Any, hostfile: Path) -> None:
    found = shown("--hostfile", str(hostfile), "--include", "worker-1:1,3@worker-2")
    told = [
        (rank["rank"], rank["host"], rank["node_rank"], rank["local_rank"], rank["slot"]) for rank in found["ranks"]
    ]
    first = [(0, "worker-1", 0, 0, 1), (1, "worker-1", 0, 1, 3)]
    assert told == [*first, *((2 + slot, "worker-2", 1, slot, slot) for slot in range(4))]
    assert found["hosts"][0] == {"name": "worker-1", "slots": 2, "chosen": [1, 3]}
    assert found["read"][0] == {"source": f"{hostfile}:1", "value": "worker-1 slots=4"}


def test_slurm_is_found_and_shown(
    shown: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"JOB_ID": "7", "JOB_NODELIST": "gpu[01-02]", "NTASKS": "4", "TASKS_PER_NODE": "2(x2)", "NODEID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = shown()
    assert (found["place"], found["job"], found["this"], found["world_size"]) == ("slurm", "7", 0, 4)
    said = capsys.readouterr().out
    for part in (
        "found: slurm, job 7",
        "SLURM_TASKS_PER_NODE",
        "2(x2)",
        "gpu01  <- this machine",
        "2 hosts, 4 slots",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("layout", "across"),
    [
        # Eight ranks, four a host. Counted by hand: tensor pairs are neighbours, data pairs two apart, stages four.
        ("pp2 dp2 tp2", {"pipeline": (0, 4), "replicate": (4, 0), "tensor": (4, 0)}),
        ("dp2 tp4", {"replicate": (0, 4), "tensor": (2, 0)}),
        ("tp8", {"tensor": (0, 1)}),
        ("fsdp8", {"shard": (0, 1)}),
        ("dp4 tp2 order=tp.pp.dp.fsdp.cp", {"replicate": (2, 0), "tensor": (0, 4)}),
    ],
)
def test_groups_that_cross_hosts(shown: Any, hostfile: Path, layout: str, across: dict[str, tuple[int, int]]) -> None:
    found = shown("--hostfile", str(hostfile), "--layout", layout)
    assert {each["axis"]: (each["inside"], each["across"]) for each in found["axes"]} == across
    assert bool(found["warnings"]) == (across.get("tensor", (0, 0))[1] > 0)


def test_coordinates_of_a_layout(shown: Any, hostfile: Path) -> None:
    found = shown("--hostfile", str(hostfile), "--layout", "pp2 dp2 tp2")
    assert found["layout"] == "pp2 dp2 tp2"
    for number, rank in enumerate(found["ranks"]):
        place = {"pipeline": number // 4, "replicate": number // 2 % 2, "tensor": number % 2}
        assert rank["coordinates"] == place


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (
            ["--layout", "tp8"],
            "1 of 1 tensor groups cross hosts, and they talk in every block; a host has 4 slots, so",
        ),
        (["--layout", "dp2 tp3", "--num-procs", "3"], None),
        (["--layout", "dp3 tp2", "--num-procs", "3"], "2 ranks don't divide the 3 slots of a host: --num-procs 2"),
        (["--layout", "dp4 tp2 order=tp.pp.dp.fsdp.cp"], "order=pp.dp.fsdp.cp.tp, the default, keeps the nearest"),
    ],
)
def test_a_slow_placement_is_warned_of(
    hostfile: Path, capsys: pytest.CaptureFixture[str], words: list[str], warning: str | None
) -> None:
    assert main(["hosts", "--hostfile", str(hostfile), *words]) == 0
    said = capsys.readouterr().out
    assert ("warning: " in said) == (warning is not None)
    assert warning is None or warning in said


def test_a_layout_without_a_size_takes_every_slot(shown: Any, hostfile: Path) -> None:
    assert shown("--hostfile", str(hostfile), "--layout", "ddp")["layout"] == "dp8"


def test_many_ranks_are_cut_short_on_the_screen(
    tmp_path: Path, shown: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "many").write_text("".join(f"w{n} slots=8\n" for n in range(16)), encoding="utf-8")
    assert len(shown("--hostfile", str(tmp_path / "many"))["ranks"]) == 128
    assert "the first 64 of 128 ranks; --json FILE has them all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--layout", "pp2 dp2"],
            "the hosts have 8 slots: --num-procs N gives each host N",
        ),
        (["--layout", "xx2"], '"xx2" is not a part of a layout'),
        (["--num-nodes", "3"], "a number from 1 to 2"),
        (["--num-procs", "5"], "worker-1 has 4 slots"),
        (["--include", "worker-3"], 'there is no host "worker-3"'),
        (["--include", "worker-1", "--exclude", "worker-2"], "both given"),
        (["--place", "slurm"], '--place "slurm" and --hostfile FILE are two places'),
        (["--ray", "auto"], "both name hosts"),
        (["--bind", "some"], "--bind some: it can be auto, none, cores, numa"),
        (["--num-nodes", "two"], '"two" is no whole number'),
        (["--json", "/no/such/folder/file"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_options(hostfile: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, "--hostfile", str(hostfile), *words)


def test_a_place_that_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert '--place "slurm": it needs SLURM_JOB_ID' in refused(capsys, "--place", "slurm")


def test_one_of_many_tells_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, told in (("0", True), ("1", False)):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert main(["hosts"]) == 0
        assert ("found: torchrun" in capsys.readouterr().out) == told
