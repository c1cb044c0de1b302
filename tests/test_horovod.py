"""Engine horovod: the step of one process, compressed and fused messages, ranks that horovodrun started."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from engine_recipes import Branched, recipe
from proving import prove, same
from small_tasks import Failing, Points, Words
from tiny_models import Tiny
from torch import nn

import samestep
from samestep.launch import local
from samestep.launch.network import LOOPBACK
from samestep.launch.script_env.horovod import serving, slots_of
from samestep.launch.world import join
from samestep.verification.proof import Proof

pytest.importorskip("horovod", reason="Horovod is not built; use make horovod")

ENGINE = {"engine": "horovod"}


def settings_file(folder: Path, **values: Any) -> Path:
    file = folder / "horovod.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def test_two_ranks_take_the_step_of_one_process(tmp_path: Path) -> None:
    # 200 samples in batches of 33 leave a last one of 2: a rank with one sample, and micro-batches with zero weight.
    plain = recipe(schedule=samestep.Schedule(warmup=3, decay="linear"))
    words = recipe(Words(), optimizer=samestep.SGD(lr=0.1, momentum=0.9), batch=199, clip=None)
    half = settings_file(tmp_path, compression="fp16", fusion_threshold_mb=0.001, cycle_time_ms=0.5)
    cases: dict[str, Any] = {
        "plain": (plain, {}),
        "accumulated": (plain, {"micro_batch": 7}),
        "words": (words, {"micro_batch": 30}),
        "branches": (recipe(Branched()), {"micro_batch": 9}),
        "text": (recipe(Tiny(name="bert"), batch=13), {"micro_batch": 3}),
        "compressed": (plain, {"engine_config": half}),
    }
    proofs = prove({name: (job, "dp2", {**ENGINE, **run}) for name, (job, run) in cases.items()})
    *names, compressed = cases
    assert same(proofs, names) == {}
    rounded = proofs[compressed]
    assert isinstance(rounded, Proof)
    assert 1e-8 < rounded.max_relative_difference["loss"] < 1e-2  # 11 bits of a gradient


def test_bytes_sent_are_counted_and_halved_by_compression(tmp_path: Path) -> None:
    plain, half = (
        samestep.dry_run(recipe(), "dp2", engine="horovod", engine_config=file, threads=1)
        for file in (None, settings_file(tmp_path, compression="fp16"))
    )
    parameters = 4 * sum(p.numel() for p in Points().model().parameters())
    # A ring of two ranks sends the message once; beside it two sums of 8 bytes, and a flag a parameter.
    other = 2 * 8 + 8 * len(list(Points().model().parameters()))
    for rank in plain:
        assert rank.sent == {"all-reduce": parameters + other}
    for rank in half:
        assert rank.sent == {"all-reduce": parameters // 2 + other}


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(samestep.RankFailedError, match=r"rank 1 failed first(.|\n)*planted in rank 1"):
        samestep.train(recipe(Failing(way="raise")), "dp2", engine="horovod", threads=1, folder=tmp_path / "run")


def _broadcast(settings: Any) -> list[Any]:
    from samestep.engines.horovod import distributed, start

    with join(device="cpu", threads=1) as world:
        start(settings)
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        fresh = distributed(optimizer, model, settings)
        untouched = not fresh.state and all(
            torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + world.rank)
        optimizer.step()  # each rank by gradients of its own
        resumed = distributed(optimizer, model, settings)
        averages = [resumed.state[p]["exp_avg"].clone() for p in model.parameters()]
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, (untouched, averages))
        return everyone


def test_state_is_broadcast_where_there_is_one_and_never_made_by_a_step() -> None:
    from samestep.engines.horovod import HorovodSettings

    (untouched, first), (also_untouched, second) = local.start(_broadcast, (HorovodSettings(),), 2)
    assert untouched
    assert also_untouched
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, torch.full_like(a, 0.1))  # (1 - 0.9) times rank 0's gradient
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("command", "messages"), [("train", "gloo"), ("verify", "gloo"), ("train", "mpi"), ("verify", "mpi")]
)
def test_horovodrun_starts_the_ranks(command: str, messages: str, tmp_path: Path) -> None:
    program = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    assert program is not None
    if messages == "mpi" and not (importlib.import_module("horovod.torch").mpi_built() and shutil.which("mpirun")):
        pytest.skip("this Horovod was built without MPI: apt-get install libopenmpi-dev openmpi-bin, make horovod")
    job = tmp_path / "job.yaml"
    values = {"task": "regression", "batch": 33, "steps": 4, "optimizer": {"name": "sgd", "lr": 0.01}}
    job.write_text(yaml.safe_dump({"recipe": values, "run": {"layout": "dp2", "rank_lines": True}}))
    out = tmp_path / "out"
    options = ["--folder", str(out)] if command == "train" else ["--json", str(out)]
    settings = tmp_path / "horovod.yaml"
    settings.write_text(f"messages: {messages}\n", encoding="utf-8")
    options += ["--set", f"run.engine_config={settings}"]
    ours = [sys.executable, "-m", "samestep", command, str(job), "--engine", "horovod", "--device", "cpu", *options]
    done = subprocess.run(
        [program, f"--{messages}", "-np", "2", "-H", "localhost:2", *ours],
        capture_output=True,
        text=True,
        timeout=170,
        # Open MPI wants it said twice that root may start ranks.
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "HOROVOD_LOG_LEVEL": "debug",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("MPI_COMM_WORLD" in done.stdout + done.stderr) == (messages == "mpi")
    if command == "train":
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert (report["engine"], report["processes"], report["steps"]) == ("horovod", 2, 4)
        assert "rank 1: 4 steps of 16 samples = 64" in done.stdout
    else:
        assert "the same step" in done.stdout


def test_addresses_are_forgotten_group_by_group_so_that_ranks_can_meet_once_more() -> None:
    with serving(LOOPBACK, slots_of([0, 1, 0])) as (address, port):  # two hosts, of two ranks and one

        def ask(method: str, path: str) -> int:
            connection = HTTPConnection(address, port, timeout=10)
            try:
                connection.request(method, path, body=b"here" if method == "PUT" else None)
                return connection.getresponse().status
            finally:
                connection.close()

        for _ in range(2):
            assert ask("GET", "/global/1") == 404
            for path in ("/global/0", "/global/1", "/global/2", "/local_host-1/0", "/local_host-1/1"):
                assert ask("PUT", path) == 200
            for path in ("/global/0", "/global/1", "/local_host-1/0", "/local_host-1/1"):
                assert ask("DELETE", path) == 200
            assert ask("GET", "/local_host-1/0") == 404
            assert ask("DELETE", "/global/1") == 200  # once more, as where the answer was lost
            assert ask("GET", "/global/1") == 200
            assert ask("DELETE", "/global/2") == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compression: fp8", "compression is .*fp8"),
        ("fusion_threshold_mb: -1", "fusion_threshold_mb is -1"),
        ("cycle_time_ms: 0", "cycle_time_ms is 0"),
        ("cycle_time_ms: soon", "cycle_time_ms"),
        ("messages: nccl", "messages is .*nccl"),
        ("messages: mpi", "messages is mpi, and no mpirun started this process"),
        ("fusion: 3", 'did you mean "fusion_threshold_mb"|known: compression'),
        ("[compression", "no YAML file of Horovod's settings"),
        (
            "compression: fp16\ncycle_time_ms: 1\ncompression: none",
            'horovod.yaml:3: key "compression" stands twice, first in .*horovod.yaml:1; keep one of them$',
        ),
        ("- compression", "write keys and values"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "horovod.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message) as raised:
        samestep.verify(recipe(), "dp2", engine="horovod", engine_config=file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "precision", "message"),
    [
        ("fsdp2", "fp32", 'engine "horovod" does not split shard'),
        ("dp2", "fp16", "fp16"),
        ("dp2 recompute=full", "fp32", "has no recompute=full"),
    ],
)
def test_what_it_can_not_do_is_refused(layout: str, precision: Any, message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(precision=precision), layout, engine="horovod", device="cpu")
