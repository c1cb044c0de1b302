"""Offload of activations and of the optimizer: the same step, and what should leave the device has left it."""

import copy
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import Case, prove, same
from small_tasks import Points
from test_memory import PARAMETERS, Deep, Layers, usage
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.cli.main import main
from samestep.comm.mesh import new_group
from samestep.launch.world import join
from samestep.parallel.exact.buffers import check_buffers, versions
from samestep.parallel.offload.memory import HostMemory, MappedFile
from samestep.parallel.optimizer.offloaded import OffloadedOptimizer
from samestep.verification.proof import Proof

ADAM = samestep.Recipe(
    task=Points(dropout=0.1),
    batch=33,
    epochs=2,
    clip=0.5,
    optimizer=samestep.AdamW(lr=1e-2),
    schedule=samestep.Schedule(warmup=4, decay="cosine"),
)
MOMENTUM = samestep.Recipe(
    task=Points(),
    batch=33,
    optimizer=samestep.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
)
SAME: Mapping[str, Case] = {
    layout: (ADAM, layout, {"micro_batch": micro_batch})
    for layout, micro_batch in {
        "single offload=activations": 6,
        "dp2 offload=activations+optimizer": None,
        "zero1x2 offload=optimizer": 5,
        "zero1x2 offload=optimizer-disk": None,
        "fsdp2 recompute=full offload=activations+optimizer-disk": 8,
        "zero2x2 recompute=selective offload=activations+parameters": None,
        "fsdp2 offload=activations+parameters-disk": 8,
        "fsdp3 offload=parameters-disk": None,  # rows that don't divide
    }.items()
} | {
    f"momentum, {offload}": (MOMENTUM, f"single offload={offload}", {}) for offload in ("optimizer", "optimizer-disk")
}


# What each of the others adds is offloaded beside something else here, or is another number of ranks.
FAST = (
    "single offload=activations",
    "zero1x2 offload=optimizer-disk",
    "zero2x2 recompute=selective offload=activations+parameters",
    "fsdp2 offload=activations+parameters-disk",
    "momentum, optimizer",
)


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    return prove({name: SAME[name] for name in FAST}, steps=8)


@pytest.mark.slow
def test_every_offload_takes_the_step_of_one_process() -> None:
    rest = {name: case for name, case in SAME.items() if name not in FAST}
    assert same(prove(rest, steps=8), list(rest)) == {}


@pytest.mark.parametrize("name", FAST)
def test_an_offload_takes_the_step_of_one_process(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert same(proofs, [name]) == {}


def test_activations_wait_in_the_hosts_memory() -> None:
    plain, away = (usage(layout, task=Deep())[0] for layout in ("single", "single offload=activations"))
    assert away.activations < 0.6 * plain.activations
    # Whatever left is there, and not much else: each block's first input stood in two places before.
    assert plain.activations - away.activations < away.host < 1.3 * plain.activations
    assert plain.host == 0


def test_the_optimizer_is_in_the_hosts_memory() -> None:
    (rank,) = usage("single offload=optimizer")
    assert (rank.optimizer_state, rank.disk) == (0, 0)
    assert rank.parameters == rank.gradients == 4 * PARAMETERS
    assert rank.host == 16 * PARAMETERS  # a copy of parameters and gradients, and Adam's averages


def test_the_optimizer_is_on_disk(tmp_path: Path) -> None:
    (rank,) = usage("single offload=optimizer-disk", offload_folder=tmp_path)
    assert (rank.optimizer_state, rank.host) == (0, 0)
    assert rank.disk == 12 * PARAMETERS
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_on_disk(tmp_path: Path) -> None:
    for rank in usage("fsdp2 offload=parameters-disk", offload_folder=tmp_path):
        assert (rank.parameters, rank.gradients, rank.optimizer_state) == (0, 0, 0)
        assert rank.disk == pytest.approx(12 * PARAMETERS / 2, rel=0.03)  # parameters and Adam's averages
        assert rank.host == pytest.approx(4 * PARAMETERS / 2, rel=0.03)  # gradients
    assert list(tmp_path.iterdir()) == []


def offloaded(model: nn.Module, memory: HostMemory | MappedFile) -> OffloadedOptimizer:
    return OffloadedOptimizer(model.parameters(), kind=torch.optim.AdamW, memory=memory, lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 64, generator=generator)).square().sum().backward()
        optimizer.step()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_state_lies_in_a_file_of_the_folder_that_has_no_name(tmp_path: Path) -> None:
    model = Layers().model()
    file = MappedFile(tmp_path)
    optimizer = offloaded(model, file)
    steps(model, optimizer, 2)
    assert list(tmp_path.iterdir()) == []
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    open_files = [link for link in links if str(link.readlink()).startswith(str(tmp_path))]
    # A mapping keeps a descriptor of its own; each is of the one file.
    assert {link.stat().st_ino for link in open_files} == {open_files[0].stat().st_ino}
    assert open_files[0].stat().st_blocks * 512 >= 12 * PARAMETERS
    for values in optimizer.state.values():
        assert file.holds(values["exp_avg"])
        assert file.holds(values["exp_avg_sq"])


@pytest.mark.parametrize("disk", [False, True])
def test_state_moves_to_a_plain_optimizer_and_back(disk: bool, tmp_path: Path) -> None:
    def memory() -> HostMemory | MappedFile:
        return MappedFile(tmp_path) if disk else HostMemory(torch.device("cpu"))

    plain, moved = Layers().model(), Layers().model()
    moved.load_state_dict(plain.state_dict())
    first, second = torch.optim.AdamW(plain.parameters(), lr=1e-2), offloaded(moved, memory())
    steps(plain, first, 2)
    steps(moved, second, 2)
    assert equal(plain, moved)
    again = copy.deepcopy(plain)
    third = torch.optim.AdamW(again.parameters(), lr=1e-2)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    fourth = offloaded(moved, memory())
    fourth.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((plain, first), (again, third), (moved, fourth)):
        steps(model, optimizer, 2)
    assert equal(plain, again)
    assert equal(plain, moved)


def test_parameters_that_were_loaded_meanwhile_are_stepped() -> None:
    plain, moved, other = (Layers().model() for _ in range(3))
    first, second = torch.optim.AdamW(plain.parameters(), lr=1e-2), offloaded(moved, HostMemory(torch.device("cpu")))
    moved.load_state_dict(plain.state_dict())
    for model, optimizer in ((plain, first), (moved, second)):
        steps(model, optimizer, 1)
        model.load_state_dict(other.state_dict())
        steps(model, optimizer, 1)
    assert equal(plain, moved)


def test_lent_memory_is_used_again_once_it_is_free() -> None:
    class Holder:
        pass

    memory, like = HostMemory(torch.device("cpu")), torch.ones(6)
    first = Holder()
    address = memory.lend(like, until_gone=first).data_ptr()
    second = Holder()
    assert memory.lend(like, until_gone=second).data_ptr() != address
    del first
    third = Holder()
    assert memory.lend(like, until_gone=third).data_ptr() == address
    assert len(list(memory.buffers())) == 2


def test_batches_of_many_lengths_share_memory() -> None:
    class Holder:
        pass

    memory = HostMemory(torch.device("cpu"))
    for length in range(1000, 2000):
        memory.lend(torch.ones(length), until_gone=Holder()).fill_(length)
    assert sum(buffer.nbytes for buffer in memory.buffers()) < 12 * 4 * 2000


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(samestep.UserError, match=r"No space left on device .* set run.offload_folder"):
        MappedFile(tmp_path).empty((4, 4), torch.float32)


class Muon(torch.optim.SGD):
    """Stands for an optimizer that looks at whole matrices."""


def test_shards_of_an_optimizer_that_needs_whole_matrices_are_refused() -> None:
    with join(alone=True, device="cpu"):
        shard: Tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(samestep.LayoutError, match="optimizer Muon: of shards of parameters only Adadelta"):
            OffloadedOptimizer([nn.Parameter(shard)], kind=Muon, memory=HostMemory(torch.device("cpu")), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--layout", "single offload=optimizer+parameters"],
            "together there are activations+optimizer, activations+optimizer-disk, activations+parameters or "
            "activations+parameters-disk",
        ),
        (["--layout", "dp2 offload=activations+parameters"], "offload=parameters is for shards of parameters"),
        (["--layout", "dp2 offload=parameters-disk"], "offload=parameters-disk is for shards of parameters"),
        (
            ["--layout", "single offload=optimizer-disk", "--set", "run.offload_folder=nowhere"],
            "run.offload_folder is nowhere: there is no such folder; use a folder that is there",
        ),
        (
            ["--layout", "single offload=optimizer-disk", "--set", "run.offload_folder=job.yaml"],
            "run.offload_folder is job.yaml: this is a file",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("recipe: {task: regression}\n")
    assert main(["train", "job.yaml", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_buffers_on_an_accelerator_are_compared_while_parameters_are_in_main_memory() -> None:
    # Fake tensors have a device and no numbers: operators on two devices raise, and so does the read at the end.
    with join(alone=True, device="cpu"), FakeTensorMode():
        model = nn.BatchNorm1d(3)
        before = versions(model)
        for name, buffer in list(model.named_buffers()):
            setattr(model, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="privateuseone:0"))
        group = new_group([0], backend="fake")
        with pytest.raises(DataDependentOutputException):
            check_buffers(model, before, group)
