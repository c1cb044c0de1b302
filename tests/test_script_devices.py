"""`--on`: scripts that name an accelerator, on the CPU or with all ranks on one accelerator."""

import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.errors import UserError
from samestep.script_proof import command, devices, forked
from samestep.script_proof.compare import prove
from samestep.script_proof.forked import forking
from samestep.script_proof.runs import ScriptProof
from samestep.script_proof.torchrun import by_torchrun

SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["LOCAL_RANK"])
assert torch.cuda.is_available()
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
device = torch.device("cuda", rank)
torch.manual_seed(0)
torch.cuda.manual_seed_all(1)
model = DDP(nn.Linear(8, 3).to(rank), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator))
batch = 8 // dist.get_world_size()
loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data), pin_memory=True)
weights = torch.ones(3, device="cuda")
torch.save(model.state_dict(), f"{os.environ['SAVED']}/{rank}.pt")
torch.load(f"{os.environ['SAVED']}/{rank}.pt", map_location={"cuda:0": f"cuda:{rank}"})
for x, y in loader:
    x, y = x.cuda(non_blocking=True), y.to(device, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        loss = nn.functional.cross_entropy(model(x), y, weight=weights)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    assert torch.cuda.max_memory_allocated() == 0
dist.barrier(device_ids=[rank])
"""


@pytest.mark.slow  # each change alone is tested below
def test_a_script_of_accelerators_trains_on_cpus_and_each_change_is_noted_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    proof = ScriptProof(script=(f"SAVED={tmp_path}", str(script)), device="cpu", on="cpu", steps=3, time_limit=60)
    with forking(proof, by_torchrun) as starter:
        verdict = prove(proof, tmp_path / "runs", starter)
    assert verdict.same_step
    note = next(note.en for note in verdict.notes if note.en.startswith("--on cpu"))
    line = {text.strip(): number for number, text in enumerate(SCRIPT.splitlines(), 1)}
    for what, text in (
        ("torch.cuda.is_available()", "assert torch.cuda.is_available()"),
        ("torch.cuda.set_device()", "torch.cuda.set_device(rank)"),
        ("back end 'nccl': gloo", 'dist.init_process_group("nccl", device_id=torch.device("cuda", rank))'),
        ("device '0'", "model = DDP(nn.Linear(8, 3).to(rank), device_ids=[rank])"),
        ("device_ids", "model = DDP(nn.Linear(8, 3).to(rank), device_ids=[rank])"),
        ("pinned memory", next(text for text in line if "pin_memory" in text)),
        ("device 'cuda'", 'weights = torch.ones(3, device="cuda")'),
        ("map_location of torch.load", next(text for text in line if "map_location" in text)),
        ("autocast of 'cuda'", next(text for text in line if "autocast" in text)),
    ):
        places = note.partition(f"{what} (")[2].partition(")")[0].split(", ")
        assert f"train.py:{line[text]}" in places


def in_a_child(check: Callable[[], None]) -> None:
    """Run a check in a process of its own, since functions of PyTorch stay replaced.

    It isn't a fork of this process: threads of PyTorch that ran before a fork are missing in the child, which then
    may wait for them without end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    child = context.Process(target=check)
    child.start()
    child.join(60)
    ended = child.exitcode
    child.kill()
    assert ended == 0


def nothing(what: str, place: str) -> None:
    pass


def one_accelerator() -> None:
    noted = list[str]()
    target = devices.target_of("gpu:0")
    devices.install(target, devices=2, local_rank=1, note=lambda what, place: noted.append(what))
    assert torch.device("cuda:1") == torch.device("cuda", 1) == torch.device(1) == target
    assert torch.device("cuda") != target
    assert isinstance(target, torch.device)
    assert torch.cuda.device_count() == 2
    assert torch.zeros(2, device="cpu").to("cpu").device.type == "cpu"
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "gloo"
    assert noted == ["device 'cuda:1'", "device '1'", "back end 'nccl': gloo"]


def all_on_cpus() -> None:
    devices.install(devices.target_of("cpu"), devices=2, local_rank=1, note=nothing)
    cpu = torch.device("cpu")
    assert torch.device("cuda:1") == torch.device("cuda", 1) == torch.device("xpu") == cpu
    assert torch.device("meta").type == "meta"
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    tensors = (
        torch.arange(3, device="cuda:1"),
        torch.ones(3, device=1),
        torch.ones(3).to(device="cuda"),
        torch.ones(3).cuda(1),
        torch.ones(3).new_zeros(2, device="cuda"),
        torch.nn.Linear(2, 2, device="cuda").weight,
        torch.randn(2, generator=torch.Generator("cuda").manual_seed(0), device="cuda", pin_memory=True),
    )
    assert all(tensor.device == cpu for tensor in tensors)
    assert torch.nn.DataParallel(torch.nn.Linear(2, 2)).cuda()(torch.ones(1, 2)).shape == (1, 2)
    assert torch.nn.Linear(2, 2).to("cuda:1", torch.float64).weight.dtype == torch.float64
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cpu") == torch.float16
    with torch.device("meta"):
        made = (torch.empty(2), torch.arange(3), torch.nn.Linear(2, 2).weight)
    assert all(tensor.is_meta for tensor in made)
    with torch.device("cuda:1"):
        assert torch.ones(2).device == cpu
    drawn = torch.random.get_rng_state()
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize("check", [one_accelerator, all_on_cpus])
def test_accelerators_that_are_named_are_others(check: Callable[[], None]) -> None:
    in_a_child(check)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "tpu"], "--on tpu: use cpu, or gpu:0 with the number of an accelerator"),
        (["--on", "cpu", "--device", "cpu"], "--on cpu says where the script runs; leave --device cpu out"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert command.main(["train.py", *words]) == 2
    assert message in capsys.readouterr().err


OFFER = "(it asks for an accelerator, and PyTorch finds none; with --on cpu it runs on the CPU)"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the script would find this machine's accelerator")
@pytest.mark.parametrize(
    "line", ["torch.zeros(2).cuda()", "import torch.distributed as dist; dist.init_process_group('nccl')"]
)
def test_a_script_that_finds_no_accelerator_is_told_of_the_option(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    monkeypatch.chdir(tmp_path)
    assert command.main(["train.py"]) == 2
    assert OFFER in capsys.readouterr().err


def test_a_script_that_fails_otherwise_is_not_told_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no cuda.toml beside the script')\n")
    monkeypatch.chdir(tmp_path)
    assert command.main(["train.py"]) == 2
    error = capsys.readouterr().err
    assert "no cuda.toml beside the script" in error
    assert OFFER not in error


def test_a_port_is_free_and_where_none_is_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr(forked, "_PORTS", range(port, port + 1))
        with pytest.raises(UserError, match=f"all ports of 127.0.0.1 from {port} to {port} are in use"):
            forked.free_port()
    assert forked.free_port() == port
