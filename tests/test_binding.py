"""Which cores, NUMA node, accelerator and threads each rank of a host gets, on machines of any size."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from small_tasks import Points
from torch import Tensor

import samestep
from samestep.errors import UserError
from samestep.launch.affinity import (
    Binding,
    Core,
    Machine,
    bindings,
    chosen,
    describe,
    in_words,
    list_of,
    numbers_of,
    this_machine,
)
from samestep.launch.worker import rank_command

ENTRY = [sys.executable, "-m", "samestep.launch.rank_entry"]
NO_RANK = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def machine(*nodes: int, threads: int = 1, devices: tuple[int, ...] = ()) -> Machine:
    """So many cores on each NUMA node, numbered as Linux does: first one thread of every core, then the next."""
    total = sum(nodes)
    owners = [node for node, count in enumerate(nodes) for _ in range(count)]
    cores = [
        Core(processors=tuple(core + total * thread for thread in range(threads)), node=node)
        for core, node in enumerate(owners)
    ]
    return Machine(cores=tuple(cores), devices=devices)


def shown(found: list[Binding]) -> list[tuple[str, ...]]:
    """Processors, NUMA nodes, device and threads of each."""
    return [
        (
            "any" if each.processors is None else list_of(each.processors),
            list_of(each.nodes),
            "-" if each.device is None else str(each.device),
            str(each.threads),
        )
        for each in found
    ]


def test_cores_are_shared_out_with_their_hardware_threads() -> None:
    found = bindings(machine(8, 8, threads=2), 4)
    assert shown(found) == [
        ("0-3,16-19", "0", "-", "4"),
        ("4-7,20-23", "0", "-", "4"),
        ("8-11,24-27", "1", "-", "4"),
        ("12-15,28-31", "1", "-", "4"),
    ]
    assert in_words(found[1]) == "4-7,20-23 of NUMA node 0, 4 threads"


def test_ranks_stand_on_the_node_of_their_accelerator() -> None:
    # As on a server whose first accelerators hang on its second processor.
    big = machine(48, 48, threads=2, devices=(1, 1, 1, 1, 0, 0, 0, 0))
    found = bindings(big, 8)
    assert [(each.nodes, each.device, each.threads) for each in found] == [
        ((int(rank < 4),), rank, 12) for rank in range(8)
    ]
    assert shown(found)[4] == ("0-11,96-107", "0", "4", "12")
    # Some of the accelerators, and all of a node for each rank on it.
    assert shown(bindings(big, 2, "numa")) == [
        ("48-95,144-191", "1", "0", "24"),
        ("48-95,144-191", "1", "1", "24"),
    ]


@pytest.mark.parametrize(
    ("big", "ranks", "wanted"),
    [
        (machine(2, 2), 1, [("0-3", "0-1", "4")]),  # one rank has every node
        (machine(2, 2, 2, 2), 3, [("0-1", "0", "2"), ("2-3", "1", "2"), ("4-7", "2-3", "4")]),
        (machine(4, 4), 3, [("0-3", "0", "4"), ("4-5", "1", "2"), ("6-7", "1", "2")]),
        (machine(1, 7), 4, [("1", "1", "1"), ("2-3", "1", "2"), ("4-5", "1", "2"), ("6-7", "1", "2")]),
        (machine(5), 2, [("0-1", "0", "2"), ("2-4", "0", "3")]),
        # Not enough cores beside the accelerators of one node for ranks of their own.
        (machine(1, 3, devices=(0, 0)), 2, [("1", "1", "1"), ("2-3", "1", "2")]),
        # Fewer accelerators than ranks: these can't be theirs.
        (machine(2, 2, devices=(1,)), 2, [("0-1", "0", "2"), ("2-3", "1", "2")]),
    ],
)
def test_no_rank_is_split_between_nodes(big: Machine, ranks: int, wanted: list[tuple[str, ...]]) -> None:
    assert [(cores, node, threads) for cores, node, _, threads in shown(bindings(big, ranks))] == wanted


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3), st.data())
def test_every_rank_has_cores_and_no_two_the_same(nodes: list[int], threads: int, data: st.DataObject) -> None:
    big = machine(*nodes, threads=threads)
    ranks = data.draw(st.integers(1, len(big.cores)))
    devices = tuple(data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=ranks + 1)))
    found = bindings(Machine(cores=big.cores, devices=devices), ranks, "cores")
    own = [set(each.processors or ()) for each in found]
    whole = [set(core.processors) for core in big.cores]
    assert all(own)
    assert sum(map(len, own)) == len(set().union(*own))
    for each, mine in zip(found, own, strict=True):
        cores = [core for core in whole if core & mine]
        assert set().union(*cores) == mine  # no core's hardware threads are torn apart
        assert each.threads == len(cores)
    if ranks >= len(nodes) > 1:
        assert all(len(each.nodes) == 1 for each in found)
    if not devices:
        assert all(max(one) < min(two) for one, two in pairwise([set(each.nodes) for each in found]) if one != two)


def test_more_ranks_than_cores_are_not_bound_and_share_the_threads() -> None:
    small = machine(2, threads=2)
    assert chosen(small, 3, "auto") == (
        "none",
        "3 ranks and 2 cores on this host: the system shares the cores out",
    )
    assert shown(bindings(small, 3)) == [("any", "0", "-", "1")] * 3
    assert in_words(bindings(small, 3)[0]) == "any core, 1 thread"
    assert chosen(small, 2, "auto")[0] == "cores"
    assert shown(bindings(small, 1, "none")) == [("any", "0", "-", "4")]
    with pytest.raises(
        UserError, match=r"^--bind cores: 3 ranks and 2 cores on this host; use --bind none, or 2 ranks"
    ):
        bindings(small, 3, "cores")
    # A node can be shared by more ranks than it has cores.
    assert shown(bindings(small, 3, "numa")) == [("0-3", "0", "-", "1")] * 3


def test_a_system_that_binds_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert chosen(machine(4), 2, "auto") == ("none", "this system doesn't bind processes to cores")
    with pytest.raises(UserError, match="--bind none"):
        bindings(machine(4), 2, "cores")


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="ascii")
    return root


ACCELERATORS = {f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information": "" for bus in ("17", "65", "ca", "e3")} | {
    f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node": node
    for bus, node in {"17": "1", "65": "1", "ca": "0", "e3": "0"}.items()
}


def system(root: Path, **more: str) -> Path:
    """The files of a system with two NUMA nodes of two cores, of two hardware threads each, and four accelerators."""
    siblings = {
        f"sys/devices/system/cpu/cpu{p}/topology/thread_siblings_list": f"{p % 4},{p % 4 + 4}" for p in range(8)
    }
    nodes = {"sys/devices/system/node/node0/cpulist": "0-1,4-5", "sys/devices/system/node/node1/cpulist": "2-3,6-7"}
    return written(root, {**siblings, **nodes, **ACCELERATORS, **more})


def test_a_machine_is_read_from_the_systems_files(tmp_path: Path) -> None:
    root = system(tmp_path)
    found = describe(root, range(8), {})
    assert found.cores == tuple(Core(processors=(core, core + 4), node=core // 2) for core in range(4))
    assert found.devices == (1, 1, 0, 0)
    # A scheduler left these processors to us: of core 1 one of its threads.
    found = describe(root, [1, 2, 6], {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert found.cores == (Core(processors=(1,), node=0), Core(processors=(2, 6), node=1))
    assert found.devices == (1, 1)


@pytest.mark.parametrize(
    ("usable", "visible", "devices"),
    [
        ([0, 2], "3, 0", (0, 1)),
        ([0, 2], "GPU-3f21", ()),  # by a name that the files don't have
        ([0, 2], "4", ()),
        ([0, 2], "", ()),
        ([0, 2], "-1", ()),
        ([0], "0", ()),  # no core of ours is near it
        ([0], "2", (0,)),
    ],
)
def test_devices_that_cannot_be_placed_are_left_out(
    usable: list[int], visible: str, devices: tuple[int, ...], tmp_path: Path
) -> None:
    assert describe(system(tmp_path), usable, {"CUDA_VISIBLE_DEVICES": visible}).devices == devices


def test_where_the_system_says_nothing_there_is_one_node(tmp_path: Path) -> None:
    assert describe(tmp_path, [3, 5], {}) == Machine(cores=(Core(processors=(3,)), Core(processors=(5,))))
    unknown = system(tmp_path, **{"sys/bus/pci/devices/0000:17:00.0/numa_node": "-1"})
    assert describe(unknown, range(8), {}).devices == ()


def test_this_machine_has_the_processors_of_this_process() -> None:
    found = this_machine()
    assert sorted(p for core in found.cores for p in core.processors) == sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300)))
def test_lists_of_numbers_are_written_as_they_are_read(numbers: set[int]) -> None:
    assert numbers_of(list_of(sorted(numbers))) == sorted(numbers)


TELLS = "import json, os, sys; print(json.dumps([sorted(os.sched_getaffinity(0)), dict(os.environ), sys.argv[1:]]))"


def entered(options: list[str], command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENTRY, *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=NO_RANK | variables,
    )


def rank_of(local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "RANK": str(local_rank),
        "WORLD_SIZE": str(local_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(TELLS, encoding="utf-8")
    return str(file)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are wanted")
def test_a_rank_runs_on_its_cores_with_a_thread_for_each(script: str) -> None:
    mine = bindings(this_machine(), 2)[1]
    for command in ([script, "--", "-x"], ["-m", "script", "--", "-x"], [sys.executable, script, "--", "-x"]):
        done = entered(
            [], command, **rank_of(1, 2), PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{Path(script).parent}"
        )
        assert done.returncode == 0, done.stderr
        processors, environ, arguments = json.loads(done.stdout)
        assert (processors, arguments) == (list(mine.processors or ()), ["--", "-x"])
        assert environ["OMP_NUM_THREADS"] == str(mine.threads)
        assert (environ["RANK"], environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]) == ("1", "0", "1")


def test_a_rank_that_is_not_bound_has_its_share_of_threads(script: str) -> None:
    everywhere = os.sched_getaffinity(0)
    done = entered(["--bind", "none"], [script], **rank_of(0, 1))
    processors, environ, _ = json.loads(done.stdout)
    assert processors == sorted(everywhere)
    assert environ["OMP_NUM_THREADS"] == str(len(everywhere))


def test_threads_are_those_that_were_asked_for(script: str) -> None:
    # As torchrun sets it where the user set nothing, and as the user does.
    torchruns = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    cases = [([], {"OMP_NUM_THREADS": "7"}, "7"), (["--threads", "3"], {"OMP_NUM_THREADS": "7"}, "3")]
    for options, variables, threads in [*cases, ([], torchruns, str(bindings(this_machine(), 1)[0].threads))]:
        done = entered(options, [script], **rank_of(0, 1), **variables)
        assert json.loads(done.stdout)[1]["OMP_NUM_THREADS"] == threads


MISTAKES: list[tuple[list[str], list[str], dict[str, str], str]] = [
    ([], ["x.py"], {}, "this process is no rank"),
    ([], [], rank_of(0, 1), "there is no command to start"),
    ([], ["missing.py"], rank_of(0, 1), "there is no script missing.py in"),
    ([], ["no-such-program"], rank_of(0, 1), "there is no program no-such-program on"),
    ([], ["-m"], rank_of(0, 1), "-m names no module"),
    (["--bind", "sockets"], ["x.py"], rank_of(0, 1), "--bind sockets: it can be auto, none, cores, numa"),
    (["--bind", "cores"], ["x.py"], rank_of(0, 4000), "--bind cores: 4000 ranks and"),
    (["--engine", "jax"], ["x.py"], rank_of(0, 1), "--engine jax: it can be torch, deepspeed"),
    (["--threads", "many"], ["x.py"], rank_of(0, 1), '"many" is no whole number'),
    (["--threads", "0"], ["x.py"], rank_of(0, 1), '--threads: "0" is out of range'),
    (
        [],
        ["x.py"],
        {**rank_of(3, 4), "LOCAL_RANK": "4"},
        "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE 4, counted from 0",
    ),
    ([], ["x.py"], rank_of(0, 1) | {"RANK": "first"}, "RANK is 'first'; a whole number of 0 or more"),
]


@pytest.mark.parametrize(("options", "command", "variables", "message"), MISTAKES, ids=[m[-1] for m in MISTAKES])
def test_a_mistake_is_told_once(
    options: list[str], command: list[str], variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text("print('started')", encoding="utf-8")
    command = [str(tmp_path / word) if word == "x.py" else word for word in command]
    done = entered(options, command, **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("samestep: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_command_of_a_rank_is_checked_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert rank_command(["a.py", "-x"], engine="deepspeed:local-rank=no", bind="none") == [
        *ENTRY,
        *("--engine", "deepspeed:local-rank=no", "--bind", "none", "--threads", "1", "--", "a.py", "-x"),
    ]
    wrong: list[tuple[list[str], str, Any, int | None, str]] = [
        ([], "torch", "auto", None, "there is no command"),
        (["a.py"], "tensorflow", "auto", None, "--engine tensorflow: it can be"),
        (["a.py"], "torch", "sockets", None, "--bind sockets"),
        (["a.py"], "torch", "cores", 4000, "--bind cores: 4000 ranks"),
    ]
    for command, engine, bind, local_ranks, message in wrong:
        with pytest.raises(UserError, match=message):
            rank_command(command, engine=engine, bind=bind, local_ranks=local_ranks)


class Bound(Points):
    """A task whose loss sees where its rank runs and how many threads it has."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        where = [sorted(os.sched_getaffinity(0)), torch.get_num_threads()]
        (self.folder / f"{dist.get_rank()}.json").write_text(json.dumps(where), encoding="utf-8")
        return super().loss(output, batch)


@pytest.mark.skipif(len(this_machine().cores) < 2, reason="two ranks with a core each need two cores")
@pytest.mark.parametrize("choice", ["auto", "none", pytest.param("numa", marks=pytest.mark.slow)])
def test_ranks_that_a_training_starts_are_bound(choice: str, tmp_path: Path) -> None:
    own = bindings(this_machine(), 2, choice)  # pyright: ignore[reportArgumentType]
    everywhere = sorted(os.sched_getaffinity(0))
    recipe = samestep.Recipe(task=Bound(tmp_path), batch=8, steps=1)
    samestep.train(recipe, "dp2", bind=choice, check=False, folder=tmp_path / "run", log=())
    for rank, each in enumerate(own):
        processors, threads = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert processors == (everywhere if each.processors is None else sorted(each.processors))
        assert (choice == "auto") <= (len(processors) < len(everywhere))
        assert 1 <= threads <= max(1, len(everywhere) // 2)
    assert sorted(os.sched_getaffinity(0)) == everywhere  # this process stays as it was


def test_more_ranks_than_cores_are_not_bound_to_a_core_each() -> None:
    many = len(this_machine().cores) + 1
    recipe = samestep.Recipe(task=Points(), batch=many, steps=1)
    with pytest.raises(UserError, match=rf"run\.bind: cores: {many} ranks and .* use run\.bind: none"):
        samestep.train(recipe, f"dp{many}", bind="cores")
