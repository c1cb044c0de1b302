"""Engine parameter-server: the step of one process, steps that run apart, checkpoints, and what is refused."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engine_recipes import Branched, recipe
from proving import prove, same
from safetensors.torch import load_file
from small_tasks import Failing, Points, Words
from torch import nn

import samestep
from samestep.comm.mesh import build_mesh
from samestep.data.loader import StepBatch
from samestep.data.order import SampleOrder
from samestep.engines.base import Preparation
from samestep.engines.parameter_server.engine import ParameterServer
from samestep.engines.parameter_server.member import ServerSetup
from samestep.engines.parameter_server.messages import PointToPoint, Push, Pushed, PushHeader, PushKind, ReplyHeader
from samestep.engines.parameter_server.server import AsynchronousServer
from samestep.engines.parameter_server.settings import ParameterServerSettings, Roles
from samestep.engines.parameter_server.shards import Chunk, FlatParameters, bounds_of, boxes, chunks_of, spans_of
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup
from samestep.job import Job, Run
from samestep.launch import local
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.apply import spread
from samestep.parallel.parallel_model import ModelDetails
from samestep.tasks.registry import resolve
from samestep.training.fit import Training

ENGINE: Mapping[str, Any] = {"engine": "parameter-server"}
RUN: Mapping[str, Any] = {**ENGINE, "threads": 1, "device": "cpu", "log": ()}


def settings_file(folder: Path, **values: Any) -> Path:
    name = "-".join(f"{key}={value}" for key, value in values.items())
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


class Normed(Points):
    """With a batch norm, whose statistics are those of the whole batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, self.classes))


class Tokens(Points):
    """A few of many tokens, embedded; a batch touches a small part of the table."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(500, 6), nn.Flatten(), nn.Linear(4 * 6, self.classes))

    def train_set(self) -> samestep.Samples:
        return [((point.abs() * 40).long(), label) for point, label in self.pairs]

    def eval_set(self) -> samestep.Samples:
        return [self.train_set()[index] for index in range(10)]


# Batches of 33 of 200 samples leave a last one of 2; in micro-batches some have zero weight.
CASES: Mapping[str, tuple[samestep.Recipe, Mapping[str, Any]]] = {
    "plain": (recipe(schedule=samestep.Schedule(warmup=3, decay="linear")), {}),
    "accumulated": (recipe(), {"micro_batch": 7}),
    "words": (
        recipe(Words(), optimizer=samestep.SGD(lr=0.1, momentum=0.9), batch=199, clip=None),
        {"micro_batch": 30},
    ),
    "branches": (recipe(Branched()), {"micro_batch": 9}),
    "batch norm": (recipe(Normed()), {}),
    "tokens": (recipe(Tokens()), {}),
    "recomputed": (recipe(batch=5), {"layout": "recompute=full"}),
}


@pytest.mark.parametrize(
    ("servers", "workers"),
    [(2, 2), *(pytest.param(*ranks, marks=pytest.mark.slow) for ranks in ((1, 2), (1, 3), (2, 3)))],
)
def test_the_step_is_that_of_one_process(servers: int, workers: int, tmp_path: Path) -> None:
    names = list(CASES) if (servers, workers) == (1, 3) else ["accumulated", "words", "branches", "tokens"]
    config = settings_file(tmp_path, servers=servers)
    cases = {}
    for name in names:
        job, run = CASES[name]
        layout = f"dp{servers + workers} {run.get('layout', '')}".strip()
        others = {key: value for key, value in run.items() if key != "layout"}
        cases[name] = (job, layout, {**ENGINE, "engine_config": config, **others})
    assert same(prove(cases), names) == {}


def test_one_worker_without_a_bound_takes_the_step_of_one_process(tmp_path: Path) -> None:
    config = settings_file(tmp_path, staleness="infinite", delay_compensation=0.1)
    job = recipe(schedule=samestep.Schedule(warmup=3, decay="linear"), precision="fp64")
    alone = samestep.train(job, "single", threads=1, device="cpu", folder=tmp_path / "alone")
    served = samestep.train(job, "dp2", engine_config=config, folder=tmp_path / "served", **RUN)
    assert served.losses == pytest.approx(alone.losses, rel=1e-12)
    assert served.metrics == alone.metrics
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("served", "alone"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14)


def measured_by(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["engine_measured"]


@pytest.mark.parametrize(("staleness", "servers"), [(2, 1), pytest.param("infinite", 1, marks=pytest.mark.slow)])
def test_no_worker_runs_further_ahead_than_the_bound(staleness: int | str, servers: int, tmp_path: Path) -> None:
    config = settings_file(tmp_path, staleness=staleness, servers=servers)
    slow = {"rank": servers + 1, "step": 0, "fault": "slow", "seconds": 0.04}
    job = recipe(epochs=3, clip=1.0)
    found = samestep.train(job, f"dp{servers + 2}", engine_config=config, inject=slow, folder=tmp_path / "run", **RUN)
    measured = measured_by(tmp_path / "run")
    steps = len(found.losses)
    assert measured["updates"] == 2 * steps
    assert measured["left_out"] == 0
    if staleness == "infinite":
        assert measured["most_steps_ahead"] > 2  # the one that isn't slow is through long before
    else:
        assert measured["most_steps_ahead"] == 2
        assert 1 <= measured["oldest_in_updates"] <= 2 * 2 + 1
    assert found.losses[-2] < 0.9 * found.losses[0]
    assert found.metrics["accuracy"] > 0.4


@pytest.mark.parametrize(
    ("staleness", "restarts"), [(0, {}), (1, {}), pytest.param(1, {"worker_restarts": 0}, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite_stops_all_ranks(
    staleness: int, restarts: Mapping[str, Any], tmp_path: Path
) -> None:
    config = settings_file(tmp_path, staleness=staleness, **restarts)
    fault = {"rank": 1, "step": 2, "fault": "nan"}
    with pytest.raises(samestep.NonFiniteError, match="loss nan") as raised:
        samestep.train(recipe(epochs=2), "dp3", engine_config=config, inject=fault, folder=tmp_path / "run", **RUN)
    # Free workers agree on a step that none of them has begun.
    assert raised.value.step == 2 if staleness == 0 else 2 < raised.value.step <= 2 + staleness + 2


def test_a_worker_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(samestep.RankFailedError, match=r"rank 1 failed first(.|\n)*planted in rank 1"):
        samestep.train(recipe(Failing(way="raise")), "dp2", folder=tmp_path / "run", **RUN)


@pytest.mark.slow
def test_checkpoints_go_from_any_layout_to_any_other(tmp_path: Path) -> None:
    job = recipe(precision="fp64", schedule=samestep.Schedule(warmup=3, decay="cosine"))
    expected = samestep.train(job, "single", threads=1, device="cpu", folder=tmp_path / "alone").losses
    saves = {"every": 3, "keep": 9, "folder": tmp_path / "saved"}
    two = settings_file(tmp_path, servers=2)
    samestep.train(job, "dp3", engine_config=two, checkpoint=saves, folder=tmp_path / "first", **RUN)
    goes_on = {"resume": str(tmp_path / "saved" / "step-3"), "folder": tmp_path / "later"}
    native = samestep.train(job, "single", threads=1, device="cpu", checkpoint=goes_on, folder=tmp_path / "native")
    served = samestep.train(job, "dp3", checkpoint=goes_on, folder=tmp_path / "served", **RUN)  # one server
    for found in (native, served):
        assert found.first_step == 3
        assert found.losses == pytest.approx(expected[3:], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "staleness"), [(0, 0), (2, 0), (0, 1), (2, 1)])
def test_a_rank_that_dies_comes_back_from_the_checkpoint(rank: int, staleness: int, tmp_path: Path) -> None:
    config = settings_file(tmp_path, staleness=staleness)
    job = recipe(precision="fp64", epochs=2)
    expected = samestep.train(job, "single", threads=1, device="cpu", folder=tmp_path / "alone").losses
    found = samestep.train(
        job,
        "dp3",
        engine_config=config,
        checkpoint={"every": 2},
        max_restarts=1,
        inject={"rank": rank, "step": 5, "fault": "kill"},
        folder=tmp_path / "run",
        **RUN,
    )
    assert len(found.losses) == len(expected)
    if staleness == 0:
        assert found.losses == pytest.approx(expected, rel=1e-12)
    assert all(math.isfinite(loss) for loss in found.losses)


@pytest.mark.slow
def test_a_worker_that_is_lost_for_good_leaves_the_others_training(tmp_path: Path) -> None:
    job = recipe(precision="fp64", epochs=2)
    expected = samestep.train(job, "single", threads=1, device="cpu", folder=tmp_path / "alone").losses
    found = samestep.train(
        job,
        "dp3",
        checkpoint={"every": 2},
        elastic=True,
        min_processes=2,
        max_restarts=2,
        inject={"rank": 2, "step": 5, "fault": "kill", "every_round": True},
        folder=tmp_path / "run",
        **RUN,
    )
    assert found.losses == pytest.approx(expected, rel=1e-12)


def _both_ways(job: samestep.Recipe, files: Sequence[Path]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """On each rank: the trained state and the bytes sent in a step, for each file of settings."""
    found = []
    with join(device="cpu", threads=1) as world:
        for file in files:
            run = Run(layout="dp3", engine_config=file, **ENGINE)
            training = Training(Job(recipe=job, run=run), resolve(job), world, Layout.parse("dp3"))
            for _ in training.steps(measured=2):
                pass
            assert training.usage is not None
            found.append((training.session.trainer.state(), training.usage.sent["point-to-point"]))
    return found


def test_touched_rows_are_fewer_bytes_and_the_same_bits(tmp_path: Path) -> None:
    files = [settings_file(tmp_path, sparse_rows=sparse) for sparse in (True, False)]
    job = recipe(Tokens(), batch=20, epochs=None, steps=5)
    (rows, fewer), (whole, more) = local.start(_both_ways_of_worker, (job, files), 3)
    assert all(torch.equal(rows[name], value) for name, value in whole.items())
    dense = 4 * sum(p.numel() for p in Tokens().model().parameters())
    header = 8 * (7 + 3)
    assert more == dense + header
    table = 4 * 500 * 6
    assert fewer < dense - table + 8 * 6 + 20 * 4 * (6 * 4 + 8) + header < more


def _both_ways_of_worker(job: samestep.Recipe, files: Sequence[Path]) -> list[tuple[dict[str, torch.Tensor], int]]:
    gathered: list[Any] = [None] * 3
    with join(device="cpu", threads=1) as world:
        torch.distributed.all_gather_object(gathered, _both_ways(job, files))
        assert world.world_size == 3
    return gathered[1]


class Scripted(PointToPoint):
    """Pushes that come in a given order, and the answers that go out."""

    def __init__(self, pushes: Sequence[tuple[int, Pushed]]) -> None:
        self.pushes = list(pushes)
        self.answered: list[tuple[int, ReplyHeader, torch.Tensor | None]] = []

    def receive_push(self, chunks: Sequence[Chunk], dtype: torch.dtype, worker: int | None) -> tuple[int, Pushed]:
        return self.pushes.pop(0)

    def reply(self, worker: int, answer: ReplyHeader, parameters: torch.Tensor | None) -> None:
        self.answered.append((worker, answer, None if parameters is None else parameters.clone()))

    def wait(self) -> None:
        pass


def _pushed(gradient: torch.Tensor, chunks: Sequence[Chunk]) -> Pushed:
    told = PushHeader(loss=1.0, count=1.0, samples=1.0, global_samples=2.0, norm=1.0, stop_at=math.inf)
    push = Push(chunks, [gradient[chunk.at].view(chunk.shape) for chunk in chunks], sparse=False)
    assert push.values is not None
    return Pushed(told, chunks, [int(kind) for kind in push.kinds.tolist()], torch.empty(0), push.values)


@contextmanager
def served(
    settings: ParameterServerSettings,
    model: nn.Module,
    pushes: Callable[[Sequence[Chunk]], Sequence[tuple[int, Pushed]]],
) -> Iterator[tuple[AsynchronousServer, Scripted]]:
    """A server of SGD with a rate of 0.1 and workers 1 and 2, to whom comes what `pushes` makes of its chunks."""
    with join(alone=True, device="cpu", threads=1) as world:
        options, details = Options(precision="fp64"), ModelDetails()
        precision = Precision(options.precision, world.device)
        mesh = build_mesh(Layout(), "cpu")
        spread_model = spread(
            model, Layout(), mesh, world.device, options=options, autocast=precision.autocast, details=details
        )
        flat = FlatParameters(model, 1)
        chunks = {nn.Parameter(flat.values[chunk.at].view(chunk.shape)): chunk for chunk in flat.chunks[0]}
        wire = Scripted(pushes(list(chunks.values())))
        optimizer = torch.optim.SGD(chunks, lr=0.1)
        how = Preparation(
            layout=Layout(),
            mesh=mesh,
            device=world.device,
            options=options,
            optimizer_of=lambda _: optimizer,
            schedule_of=lambda _: None,
            details=details,
        )
        setup = TrainerSetup(
            how=how,
            model=model,
            spread_model=spread_model,
            optimizer=optimizer,
            schedule=None,
            precision=precision,
        )
        shared = ServerSetup(flat=flat, roles=Roles.of(settings, 3), settings=settings, wire=wire)
        yield AsynchronousServer(setup, shared, chunks, number=0), wire


def _serve_step(server: AsynchronousServer, step: int) -> float:
    batch = StepBatch(step=step, epoch=0, micro_batches=[], global_samples=2, data_seconds=0)
    return server.step(batch, Points().loss).loss.item()


def test_a_late_gradient_is_compensated_and_the_fast_worker_waits() -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(8, dtype=torch.float64) for _ in range(3))
    fast, slow = 1, 2

    def pushes(chunks: Sequence[Chunk]) -> Sequence[tuple[int, Pushed]]:
        return [(fast, _pushed(a, chunks)), (fast, _pushed(b, chunks)), (slow, _pushed(c, chunks))]

    settings = ParameterServerSettings(staleness=1, delay_compensation=0.7)
    with served(settings, nn.Linear(3, 2, dtype=torch.float64), pushes) as (server, wire):
        before = server.flat.values.clone()
        _serve_step(server, 0)
        # Each gradient has half the batch, so half the rate. The slow worker's is two updates late.
        one = before - 0.05 * a
        two = one - 0.05 * b
        three = two - 0.05 * (c + 0.7 * c * c * (two - before))
        torch.testing.assert_close(server.flat.values, three)
        # After its second step the fast worker is two ahead: its answer waits for the slow one's push.
        assert [worker for worker, _, _ in wire.answered] == [fast, fast, slow]
        torch.testing.assert_close(wire.answered[0][2], one)
        torch.testing.assert_close(wire.answered[1][2], three)
        measured = server.measured()
        assert (measured["updates"], measured["oldest_in_updates"], measured["most_steps_ahead"]) == (3, 2, 1)
        assert "deaths" not in measured  # no worker may die


def _told(kind: PushKind, chunks: Sequence[Chunk]) -> Pushed:
    told = PushHeader(loss=0, count=0, samples=1, global_samples=2, norm=math.nan, stop_at=math.inf, kind=kind)
    return Pushed(told, chunks, [], torch.empty(0), torch.empty(0))


def test_nobody_waits_for_a_worker_that_is_away() -> None:
    gradients = [torch.full((8,), 2.0**power, dtype=torch.float64) for power in range(6)]
    here, away = 1, 2

    def pushes(chunks: Sequence[Chunk]) -> Sequence[tuple[int, Pushed]]:
        one, two, three, four, five, six = (_pushed(gradient, chunks) for gradient in gradients)
        missed, lost = _told(PushKind.MISSED, chunks), _told(PushKind.LOST, chunks)
        leaves, returns = _told(PushKind.AWAY, chunks), _told(PushKind.BACK, chunks)
        return [
            *((here, one), (here, two), (away, leaves), (here, three)),  # two steps ahead, which it may not be else
            *((away, missed), (away, missed), (away, missed), (away, returns), (away, four)),  # in its fourth step
            *((away, leaves), (away, lost), (here, five)),
            (here, six),  # now it has done the step of the lost one too
        ]

    with served(
        ParameterServerSettings(staleness=1, worker_restarts=1), nn.Linear(3, 2, dtype=torch.float64), pushes
    ) as (
        server,
        wire,
    ):
        before = server.flat.values.clone()
        assert [_serve_step(server, step) for step in range(4)] == [1.0] * 4
        torch.testing.assert_close(server.flat.values, before - 0.05 * sum(gradients[:5]))
        told = [(worker, answer.slowest, shard is not None) for worker, answer, shard in wire.answered]
        first = [(here, 0, True), (here, 2, True), (here, 3, True)]
        catches_up, returns = [(away, 3, False)] * 3, [(away, 3, True)] * 2
        assert told == [*first, *catches_up, *returns, (here, 4, True)]
        _serve_step(server, 4)
        assert [(worker, answer.slowest) for worker, answer, _ in wire.answered[-2:]] == [(here, 5), (away, 5)]
        measured = server.measured()
        assert (measured["deaths"], measured["returns"], measured["lost_workers"]) == (2, 1, 1)
        assert (measured["missed_steps"], measured["missed_samples"]) == (4, 4)
        assert measured["updates_until_returns"] == 1


def test_a_lost_worker_has_its_answer_before_ranks_meet_though_none_is_present() -> None:
    present, lost = 1, 2

    def pushes(chunks: Sequence[Chunk]) -> Sequence[tuple[int, Pushed]]:
        gradient = _pushed(torch.ones(8, dtype=torch.float64), chunks)
        leaves, is_lost, misses = (_told(kind, chunks) for kind in (PushKind.AWAY, PushKind.LOST, PushKind.MISSED))
        first = [(lost, leaves), (lost, is_lost), (present, gradient)]
        return [*first, (lost, is_lost), (present, leaves), (present, misses)]

    settings = ParameterServerSettings(staleness=1, worker_restarts=1)
    with served(settings, nn.Linear(3, 2, dtype=torch.float64), pushes) as (server, wire):
        # The second step has no loss of its own, and shows that of the first.
        assert [_serve_step(server, step) for step in range(2)] == [1.0, 1.0]
        assert [(worker, answer.slowest) for worker, answer, _ in wire.answered] == [
            *((present, 1), (lost, 1)),
            *((present, 2), (lost, 2)),  # none is waited for: each goes by its own steps
        ]


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_shards_have_near_equal_bytes_and_rows_of_tables_stay_whole(servers: int) -> None:
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(1001, 7),
            "wide": nn.Linear(64, 3),
            "norm": nn.LayerNorm(64),
            "frozen": nn.Linear(9, 9),
        }
    )
    model["frozen"].requires_grad_(False)
    spans = spans_of(model)
    cuts = bounds_of(spans, servers)
    total = 1001 * 7 + 64 * 3 + 3 + 2 * 64
    assert (cuts[0], cuts[-1]) == (0, total)
    sizes = [after - before for before, after in pairwise(cuts)]
    assert max(sizes) - min(sizes) <= 2 * 7  # a row at either end
    for before, after in pairwise(cuts):
        for chunk in chunks_of(spans, before, after):
            assert not chunk.span.table or (chunk.first % 7 == 0 and chunk.last % 7 == 0)
            assert len(chunk.shape) == len(chunk.span.shape)


@pytest.mark.parametrize("shape", [(24,), (6, 4), (2, 3, 4), (2, 2, 3, 2)])
def test_a_range_of_elements_is_rectangular_parts(shape: tuple[int, ...]) -> None:
    whole = torch.arange(24)
    for first in range(24):
        for last in range(first + 1, 25):
            found = torch.zeros(24, dtype=torch.int64).view(shape)
            begin = first
            for offsets, lengths in boxes(shape, first, last):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                end = begin + math.prod(lengths)
                found[place] += whole[begin:end].view(lengths) + 1
                begin = end
            expected = torch.zeros(24, dtype=torch.int64)
            expected[first:last] = whole[first:last] + 1
            assert torch.equal(found.view(-1), expected)


def test_workers_share_a_batch_out_and_servers_take_none() -> None:
    order = SampleOrder(size=50, batch=11, seed=3)
    roles = Roles.of(ParameterServerSettings(servers=2), 5)
    taken: list[int] = []
    for rank in range(5):
        shares = order.shares(1, roles.place(rank), micro_batch=2)
        assert len(shares) == 2
        taken += [number for share in shares if not share.zero_weight for number in share.samples.tolist()]
        assert rank >= 2 or all(share.zero_weight for share in shares)
    assert taken == order.global_batch(1).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("servers: 0", "servers is 0"),
        ("servers: 1.5", "servers"),
        ("staleness: -1", "staleness is -1; it should be greater than or equal to 0, or 'infinite'$"),
        ("staleness: never", r"staleness is 'never'; it should be .*number, or 'infinite'$"),
        ("delay_compensation: 0.1", "with staleness 0 no gradient is delayed; use staleness: 1 or more, or infinite"),
        ("{delay_compensation: 0, staleness: 1}", "delay_compensation is 0"),
        ("server: 2", 'did you mean "servers"'),
        ("[servers", r"servers.yaml:1: no YAML file of a parameter server's settings: [^\n]*expected[^\n]*$"),
        (
            "servers: 1\nservers: 2",
            'servers.yaml:2: key "servers" stands twice, first in .*servers.yaml:1; keep one of them$',
        ),
        ("[1, 2]", r"no YAML file of a parameter server's settings: it is \[1, 2\]; write keys and values"),
        ("servers: 3", r'layout "dp3": servers is 3, and of 3 ranks none .* use servers: 2 or fewer, or dp4 or more'),
        ("staleness: 4", "does not take the same step .* 9 updates of every other worker late"),
        ("staleness: infinite", "does not take the same step .* any number of updates late"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(samestep.UserError, match=message):
        samestep.verify(recipe(), "dp3", engine_config=file, device="cpu", **ENGINE)


@pytest.mark.parametrize(
    ("layout", "run", "message"),
    [
        ("single", {}, "needs a server and a worker at least; use dp2 or more"),
        ("fsdp2", {}, 'engine "parameter-server" does not split shard'),
        ("tp2", {}, 'engine "parameter-server" does not split tensor'),
        ("pp2", {}, 'engine "parameter-server" does not split pipeline'),
        ("dp2", {"on_nonfinite": "skip"}, "takes every step"),
        (
            "dp2",
            {"engine": "native", "engine_config": "file"},
            'engine "native" has no configuration file of its own; leave it out, or use engine .*parameter-server',
        ),
        (
            "dp2",
            {"engine": "native", "staleness": 1},
            'unknown key "run.staleness"; it is a setting of the parameter server; use engine: parameter-server and',
        ),
    ],
)
def test_what_it_can_not_have_is_refused(layout: str, run: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    given = {**ENGINE, "device": "cpu", **run}
    if given.get("engine_config"):
        given["engine_config"] = settings_file(tmp_path, staleness=1)
    with pytest.raises(samestep.UserError, match=message):
        samestep.train(recipe(), layout, **given)


class Scale(Points):
    """A model of two numbers."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        (
            Scale(),
            {"servers": 3},
            r"servers is 3, and the model's 2 trained parameters \(2 elements\) .* use servers: 2$",
        ),
        (Normed(), {"staleness": 1}, r"1 \(BatchNorm1d\) takes its statistics over all workers"),
    ],
)
def test_models_that_servers_can_not_share_are_refused(
    task: samestep.Task, values: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    config = settings_file(tmp_path, **values)
    with pytest.raises(samestep.UserError, match=message):
        ParameterServer().check_task(task, Layout.parse("dp4"), config)


def _own_loop(kind: str) -> Any:
    torch.manual_seed(0)
    task = Points()
    model = task.model()
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "AdamW" else torch.optim.LBFGS(model.parameters())
    )
    with samestep.session("ddp", engine="parameter-server", device="cpu", threads=1) as session:
        try:
            model, optimizer = session.prepare(model, optimizer)
        except samestep.UserError as error:
            return str(error)
        batches = session.batches(task.train_set(), batch=33, collate=task.collate)
        return [session.step(batch, task.loss).loss.item() for batch in batches]


def test_a_loop_of_ones_own_and_an_optimizer_of_whole_tensors(tmp_path: Path) -> None:
    losses, refused = local.start(_own_loops, (), 2)
    alone = samestep.train(
        samestep.Recipe(task=Points(), batch=33, epochs=1, optimizer=samestep.AdamW(lr=0.01, decay_all=True)),
        threads=1,
        device="cpu",
        folder=tmp_path / "alone",
    )
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert "which LBFGS is not known to allow" in refused


def _own_loops() -> list[Any]:
    with join(device="cpu", threads=1):
        return [_own_loop("AdamW"), _own_loop("LBFGS")]
