"""Engine parameter-server: the processes of asynchronous workers die, the others go on, and they come back."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_recipes import Branched, recipe
from safetensors.torch import load_file
from small_tasks import Points, Unscored
from test_parameter_server import ENGINE, RUN, Tokens, measured_by, settings_file
from torch import Tensor, nn

import samestep
from samestep.engines.parameter_server.settings import ParameterServerSettings, check_place

_LIMIT = 60.0  # seconds that one waits for the others


def _raise() -> None:
    raise ArithmeticError("planted in a worker's process")


def _user_error() -> None:
    raise samestep.UserError("the user's fault, seen late")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_DEATHS: Mapping[str, Callable[[], None]] = {
    "kill": _kill,
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "user error": _user_error,
}


class Mortal(Points):
    """Processes of the last worker die between forward and backward, in these ways, one after the other.

    Files in `place` tell how many losses each rank has computed, and which processes computed them.
    """

    def __init__(self, place: Path, ways: Sequence[str], *, dies_in: int, workers: int = 3) -> None:
        """`dies_in`: the loss that a process dies in, of the rank, from 1."""
        super().__init__()
        self.place, self.ways, self.dies_in, self.workers = place, ways, dies_in, workers
        self.rank_process = 0

    def model(self) -> nn.Module:
        self.rank_process = os.getpid()
        return super().model()

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        mine, ranks = dist.get_rank(), dist.get_world_size()
        losses = self.count("losses", mine)
        if os.getpid() != self.rank_process:
            self.count("process", os.getpid())
            if mine == ranks - 1:
                deaths = self.so_far("deaths", mine)
                if deaths < len(self.ways) and losses >= self.dies_in:
                    self.count("deaths", mine)
                    _DEATHS[self.ways[deaths]]()
                self.count("lives", deaths)
        self.between(mine, ranks)
        return super().loss(output, batch)

    def between(self, mine: int, ranks: int) -> None:
        """Where one waits for the others."""

    def count(self, what: str, number: int) -> int:
        with (self.place / f"{what}-{number}").open("ab") as file:
            file.write(b".")
        return self.so_far(what, number)

    def so_far(self, what: str, number: int) -> int:
        file = self.place / f"{what}-{number}"
        return file.stat().st_size if file.exists() else 0

    def processes(self) -> list[int]:
        return [int(file.name.partition("-")[2]) for file in self.place.glob("process-*")]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _LIMIT
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)


class Away(Mortal):
    """The process that comes back is ready only when the others are steps further, and they then wait for it."""

    others_at, others_wait_at = 13, 16  # losses
    _held = False

    def between(self, mine: int, ranks: int) -> None:
        if mine == ranks - 1:
            if not self._held and os.getpid() == self.rank_process:
                self._held = True
                os.register_at_fork(after_in_child=self._begin)
        elif self.so_far("losses", mine) >= self.others_wait_at:
            wait_for(lambda: self.so_far("lives", 1) > 0)

    def _begin(self) -> None:
        last = dist.get_world_size() - 1
        if self.so_far("deaths", last):
            others = range(last + 1 - self.workers, last)
            wait_for(lambda: all(self.so_far("losses", rank) >= self.others_at for rank in others))


def all_gone(processes: Sequence[int]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(psutil.pid_exists(number) for number in processes):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_others_go_on_while_a_worker_is_away_and_it_comes_back(servers: int, tmp_path: Path) -> None:
    dies_in, staleness = 5, 1
    task = Away(tmp_path, ["kill"], dies_in=dies_in)
    config = settings_file(tmp_path, staleness=staleness, servers=servers, worker_restarts=2)
    job = recipe(task, batch=50, epochs=6)
    layout = f"dp{servers + 3}"
    found = samestep.train(job, layout, engine_config=config, folder=tmp_path / "run", **RUN)
    measured = measured_by(tmp_path / "run")
    steps = 24
    assert len(found.losses) == steps
    assert (measured["deaths"], measured["returns"], measured["lost_workers"]) == (1, 1, 0)
    # When it died, the two others had pushed at most `staleness + 1` steps more than it had. When it was ready
    # again, each had had an answer to all pushes but its last one.
    assert measured["updates_until_returns"] >= 2 * (task.others_at - 1 - (dies_in - 1 + staleness + 1))
    # It went on where the slowest of the others was then, with a gradient in every step.
    assert task.others_at - dies_in <= measured["missed_steps"] <= task.others_wait_at - dies_in
    assert measured["updates"] == 3 * steps - measured["missed_steps"]
    assert 16 * measured["missed_steps"] <= measured["missed_samples"] <= 17 * measured["missed_steps"]
    assert task.so_far("lives", 1) == steps - (dies_in - 1) - measured["missed_steps"]
    # No rank was started again, and it learned as others do.
    assert not (tmp_path / "run" / "faults.jsonl").exists()
    assert found.losses[-2] < 0.9 * found.losses[0]
    assert found.metrics["accuracy"] > 0.4
    assert all_gone(task.processes())


@pytest.mark.slow
def test_a_worker_that_dies_beyond_its_limit_is_lost_and_the_others_finish(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Mortal(tmp_path, ["raise", "exit"], dies_in=4)
    config = settings_file(tmp_path, staleness=2, worker_restarts=1)
    job = recipe(task, batch=50, epochs=4, evaluation={"every": 5})
    found = samestep.train(job, "dp4", engine_config=config, folder=tmp_path / "run", **RUN)
    measured = measured_by(tmp_path / "run")
    assert (measured["deaths"], measured["returns"], measured["lost_workers"]) == (2, 1, 1)
    assert measured["missed_steps"] == 16 - 3
    assert measured["updates"] == 2 * 16 + 3
    assert found.losses[-2] < 0.9 * found.losses[0]
    told = capfd.readouterr().err
    assert "samestep: the process of worker 2 (rank 3) died in step 3: its step raised" in told
    assert "ArithmeticError: planted in a worker's process" in told
    assert "; it comes back, time 1 of 1" in told
    assert "it ended with exit code 3; the others go on without it" in told
    assert all_gone(task.processes())


def test_a_job_whose_workers_are_all_lost_fails(tmp_path: Path) -> None:
    task = Mortal(tmp_path, ["kill"], dies_in=2)
    config = settings_file(tmp_path, staleness=2, worker_restarts=0)
    with pytest.raises(samestep.RankFailedError, match="every worker is lost: worker_restarts is 0"):
        samestep.train(recipe(task), "dp2", engine_config=config, folder=tmp_path / "run", **RUN)
    assert all_gone(task.processes())


class Unpicklable(Unscored):
    """Targets that no other process can be given."""

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        inputs, targets = (torch.stack(list(each)) for each in zip(*samples, strict=True))
        return samestep.Batch(inputs, lambda: targets)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return super().loss(output, batch._replace(targets=batch.targets()))


@pytest.mark.parametrize(
    ("mistaken", "message"),
    [
        (lambda place: Mortal(place, ["user error"], dies_in=2), "the user's fault, seen late"),
        pytest.param(
            lambda place: Unpicklable(),
            r"worker_restarts: a batch goes .* by pickle, .* leave worker_restarts out",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_of_the_users_is_no_death(mistaken: Any, message: str, tmp_path: Path) -> None:
    config = settings_file(tmp_path, staleness=2, worker_restarts=5)
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(mistaken(tmp_path)), "dp2", engine_config=config, folder=tmp_path / "run", **RUN)


class Counting(Points):
    """A model that counts its training forwards, in a buffer that it replaces."""

    def model(self) -> nn.Module:
        return nn.Sequential(Count(), super().model())


class Count(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "run"),
    [
        (Counting(), {}),
        pytest.param(Branched(), {"micro_batch": 9}, marks=pytest.mark.slow),
        pytest.param(Tokens(), {}, marks=pytest.mark.slow),
    ],
)
def test_a_process_computes_what_the_rank_would(task: samestep.Task, run: Mapping[str, Any], tmp_path: Path) -> None:
    job = recipe(task, precision="fp64", epochs=2)
    found = {}
    for name, more in (("rank", {}), ("process", {"worker_restarts": 0})):
        config = settings_file(tmp_path, staleness="infinite", **more)
        folder = tmp_path / name
        result = samestep.train(job, "dp2", engine_config=config, folder=folder, **RUN, **run)
        found[name] = result.losses, load_file(folder / "model.safetensors")
    assert found["process"][0] == found["rank"][0]
    for name, value in found["rank"][1].items():
        assert torch.equal(found["process"][1][name], value)
    if isinstance(task, Counting):
        assert found["process"][1]["0.seen"] == 14


class Steady(Mortal):
    """No process dies by itself, and a step takes some time."""

    def __init__(self, place: Path) -> None:
        super().__init__(place, [], dies_in=1, workers=2)

    def between(self, mine: int, ranks: int) -> None:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [1, "infinite"])
def test_processes_may_be_killed_at_any_moment(staleness: int | str, tmp_path: Path) -> None:
    """Also while they wait for a batch, and soon after they were started."""
    task, generator = Steady(tmp_path), random.Random(3)
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(generator.uniform(0.02, 0.3)) and len(killed) < 30:
            alive = [number for number in task.processes() if number not in killed and psutil.pid_exists(number)]
            if alive:
                killed.append(generator.choice(alive))
                with suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    config = settings_file(tmp_path, staleness=staleness, worker_restarts=1000)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        job = recipe(task, batch=50, epochs=60, evaluation={"every": 40})
        found = samestep.train(
            job, "dp3", engine_config=config, checkpoint={"every": 60}, folder=tmp_path / "run", **RUN
        )
    finally:
        over.set()
        killer.join()
    measured = measured_by(tmp_path / "run")
    assert len(killed) >= 5
    assert len(killed) - 2 <= measured["deaths"] <= len(killed)  # one whose last step was done is not missed
    assert measured["lost_workers"] == 0
    assert measured["updates"] == 2 * 240 - measured["missed_steps"]
    assert found.metrics["accuracy"] > 0.4
    assert not (tmp_path / "run" / "faults.jsonl").exists()
    assert all_gone(task.processes())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_server_or_a_rank_that_dies_comes_back_from_the_checkpoint(rank: int, tmp_path: Path) -> None:
    """The last worker is lost in the first round, and computes again in the second."""
    task = Mortal(tmp_path, ["kill", "kill"], dies_in=4)
    config = settings_file(tmp_path, staleness=1, worker_restarts=1)
    found = samestep.train(
        recipe(task, batch=50, epochs=4, evaluation={"every": 3}),
        "dp4",
        engine_config=config,
        checkpoint={"every": 2},
        max_restarts=1,
        inject={"rank": rank, "step": 9, "fault": "kill"},
        folder=tmp_path / "run",
        **RUN,
    )
    assert len(found.losses) == 16
    assert (tmp_path / "run" / "faults.jsonl").read_text(encoding="utf-8").count("\n") == 1
    measured = measured_by(tmp_path / "run")
    assert (measured["deaths"], measured["missed_steps"]) == (0, 0)
    assert task.so_far("lives", 2) > 0
    assert found.metrics["accuracy"] > 0.4
    assert all_gone(task.processes())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{worker_restarts: -1, staleness: 1}", "worker_restarts is -1; it should be greater than or equal to 0$"),
        ("{worker_restarts: often, staleness: 1}", "worker_restarts is 'often'; it should be a whole number$"),
        ("{worker_restarts: 1.5, staleness: 1}", "worker_restarts is 1.5; it should be a whole number$"),
        ("worker_restarts: 0", "worker_restarts is 0, and with staleness 0 all workers wait .* use staleness: 1 or"),
        ("{worker_restart: 2, staleness: 1}", 'did you mean "worker_restarts"'),
    ],
)
def test_wrong_values_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(), "dp3", engine_config=file, device="cpu", **ENGINE)


def test_it_is_no_key_of_a_job() -> None:
    message = 'unknown key "run.worker_restarts"; it is a setting of the parameter server; use engine: parameter'
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(), "dp2", worker_restarts=2, **ENGINE)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("darwin", "cpu", 0), "worker_restarts is 2, .* forked on Linux alone .this is darwin.; leave it out"),
        (("linux", "cuda", 1), "worker_restarts is 2, and the device is cuda, .* use run.device: cpu, or leave"),
        (("linux", "cpu", 2), "this process sees 2 accelerators, .* hide them .CUDA_VISIBLE_DEVICES=., or leave"),
    ],
)
def test_places_where_no_process_can_be_forked_are_refused(place: tuple[str, str, int], message: str) -> None:
    with pytest.raises(samestep.UserError, match=message):
        check_place(ParameterServerSettings(staleness=1, worker_restarts=2), *place)
    check_place(ParameterServerSettings(staleness=1), *place)
