"""Pipelines: the same step under every schedule, on models that nobody rewrote, each rank with its part alone."""

import contextlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mistakes_of_pipelines as mistakes
import pipeline_tasks as tasks
import pytest
import torch
import torch.distributed as dist
from model_tasks import NextWord, Sentences
from proving import Case, assert_same_steps, prove, same
from small_tasks import Points, Words
from token_models import Tokens
from torch import nn

import samestep
from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.apply import spread
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.parallel_model import ModelDetails
from samestep.verification.proof import Proof
from samestep.verification.tensors import TOLERANCE


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    settings: dict[str, Any] = {
        "batch": 17,
        "epochs": 2,
        "clip": 0.5,
        "optimizer": samestep.AdamW(lr=1e-2),
        "schedule": samestep.Schedule(warmup=3, decay="cosine"),
    }
    return samestep.Recipe(task=task, **{**settings, **values})


# 39 samples in batches of 17: the third step has 5. Sentences of other lengths in every micro-batch.
LLAMA = recipe(NextWord(kind="tied-llama", samples=39))
SMALL = recipe(tasks.Conditioned(samples=39))
LONGER_LLAMA = recipe(NextWord(kind="tied-llama", samples=39, layers=9))
STEPS = 3
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]
AS_MANY_AS_USUAL = ["1f1b", "zbv-zero-bubble"]  # with the micro-batches that a run has without `micro_batch`


def of_schedules() -> list[Case]:
    return [
        (SMALL, "pp2 schedule=gpipe", {"micro_batch": 7}),
        (LLAMA, "pp2", {"cut_at": ("model.layers.1",)}),
        (SMALL, "pp2 schedule=interleaved-1f1b", {"micro_batch": 3}),
        (SMALL, "pp2 schedule=interleaved-zero-bubble", {"micro_batch": 3}),
        (LLAMA, "pp2 schedule=zbv-zero-bubble", {}),
    ]


def of_more_schedules() -> list[Case]:
    apart = ("gpipe", "1f1b", "zbv-zero-bubble")
    return [
        *((LLAMA, f"pp2 schedule={schedule}", {"micro_batch": 3}) for schedule in (*apart, *SCHEDULES[2:4])),
        (LLAMA, "pp2 schedule=gpipe", {"micro_batch": 7}),
        (LLAMA, "pp2 balance=memory recompute=full", {}),
        (LLAMA, "pp2", {}),
        (LLAMA, "pp2", {"micro_batch": 7}),
        (LLAMA, "pp2 schedule=interleaved-zero-bubble stages=2", {}),
        (LONGER_LLAMA, "pp2 schedule=interleaved-1f1b stages=3", {"micro_batch": 5}),
    ]


def of_models() -> list[Case]:
    kinds = [tasks.Choosing(), tasks.Collecting()]
    return [(recipe(task), "pp2", {}) for task in kinds]


def of_more_models() -> list[Case]:
    kinds = [
        Sentences(kind="bert"),
        Sentences(kind="distilbert"),
        NextWord(kind="qwen2"),
        NextWord(kind="mistral"),
        Points(dropout=0.1),
    ]
    kinds += [
        NextWord(kind="gpt2"),
        NextWord(kind="llama"),
        Words(),
        tasks.Encoder(),
        tasks.Conditioned(),
        tasks.Images(),
        tasks.Narrowing(),
        tasks.Skipping(),
        tasks.Repeating(),
    ]
    momentum = samestep.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
    return [
        *((recipe(task), "pp2", {}) for task in kinds),
        (recipe(Sentences(kind="bert"), optimizer=momentum), "pp2 schedule=zbv-zero-bubble", {}),
        (recipe(tasks.Conditioned()), "pp2 schedule=interleaved-zero-bubble", {}),
        *((LLAMA, f"pp2 schedule={each}", {}) for each in SCHEDULES if each not in AS_MANY_AS_USUAL),
    ]


def test_every_schedule_and_models_as_they_come_take_the_same_step_on_two_ranks() -> None:
    assert_same_steps([*of_schedules(), *of_models()], steps=STEPS)


@pytest.mark.slow
def test_more_schedules_and_models_take_the_same_step() -> None:
    assert_same_steps([*of_more_schedules(), *of_more_models()], steps=STEPS)


@pytest.mark.slow
def test_four_ranks_and_data_ranks_take_the_same_step() -> None:
    cases: list[Case] = [(LLAMA, "pp4", {}), (LONGER_LLAMA, "pp4 schedule=zbv-zero-bubble", {})]
    cases += [
        (LLAMA, layout, {})
        for layout in [
            "dp2 pp2",
            "pp2 zero1x2",
            "pp2 zero2x2",
            "pp2 fsdp2 schedule=interleaved-1f1b",
            "pp2 zero1x2 schedule=interleaved-zero-bubble",
            "pp2 dp2 order=spread",
        ]
    ]
    cases.append((recipe(Sentences(kind="bert"), batch=3), "dp2 pp2", {}))  # most micro-batches have zero weight
    # The table is in both stages, whose other sizes have ZeRO-1 give it to different ranks.
    cases.append((recipe(NextWord(kind="gpt2")), "pp2 zero1x2", {"cut_at": ("transformer.h.1",)}))
    assert_same_steps(cases, steps=STEPS)


@pytest.mark.slow
def test_more_of_four_ranks_take_the_same_step() -> None:
    layouts = ["pp2 fsdp2", "pp2 fsdp2 recompute=full", "dp2 pp2 schedule=zbv-zero-bubble"]
    assert_same_steps([(LLAMA, layout, {}) for layout in layouts], steps=STEPS)


@pytest.fixture(scope="module")
def planted() -> Mapping[str, Proof | str]:
    return seen(mistakes.PLANTED[:2])


def seen(planted: tuple[type[Native], ...]) -> Mapping[str, Proof | str]:
    # The engine without a mistake comes last: what the others might leave behind in their ranks would make it differ.
    engines = (*planted, Native)
    return prove({engine.__name__: (LLAMA, "pp2", {"engine": engine()}) for engine in engines}, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", mistakes.PLANTED[:2], ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_a_pipeline_is_seen(mistake: type[Native], planted: Mapping[str, Proof | str]) -> None:
    assert_seen(mistake, planted)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", mistakes.PLANTED[2:], ids=lambda mistake: mistake.__name__)
def test_more_mistakes_in_a_pipeline_are_seen(mistake: type[Native]) -> None:
    assert_seen(mistake, seen((mistake,)))


def assert_seen(mistake: type[Native], planted: Mapping[str, Proof | str]) -> None:
    proof = planted[mistake.__name__]
    assert isinstance(proof, Proof), proof
    assert not proof.same_step
    assert max(proof.max_relative_difference.values()) > 100 * TOLERANCE
    assert same(planted, [Native.__name__]) == {}


class CountedTrainer(NativeTrainer):
    """Writes the names and sizes of what this rank holds, and how often its shards' gradients are exchanged."""

    folder: Path

    def step(self, batch: Any, loss: Any) -> Any:
        from unittest import mock

        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reduced:
            report = super().step(batch, loss)
        held = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        state = sum(value.numel() for each in self.optimizer.state.values() for value in each.values() if value.ndim)
        written = {"held": held, "state": state, "reduced": reduced.call_count, "micro": len(batch.micro_batches)}
        (self.folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(written), encoding="utf-8")
        return report


class Counted(Native):
    trainer_class = CountedTrainer

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        assert isinstance(trainer, CountedTrainer)
        trainer.folder = self.folder
        return trainer


def counted(layout: str, folder: Path, **run: Any) -> tuple[list[dict[str, Any]], samestep.TrainResult]:
    short = recipe(NextWord(kind="tied-llama"), steps=3, epochs=None, precision="fp64")
    result = samestep.train(
        short, layout=layout, engine=Counted(folder), folder=folder / "run", threads=1, log=(), **run
    )
    return written(folder), result


def written(folder: Path) -> list[dict[str, Any]]:
    """What a `CountedTrainer` has written on each rank."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]


@pytest.mark.slow
def test_a_rank_holds_its_stage_alone_and_the_run_its_picture(tmp_path: Path) -> None:
    ranks, result = counted("pp2", tmp_path, rank_lines=True)
    whole = {name: parameter.numel() for name, parameter in NextWord(kind="tied-llama").model().named_parameters()}
    first, second = (rank["held"] for rank in ranks)
    assert {**first, **second} == whole
    # The head's weight is the embedding's: what both need, and nothing else.
    assert first.keys() & second.keys() == {"model.embed_tokens.weight"}
    assert sum(first.values()) < 0.65 * sum(whole.values()) > sum(second.values())
    assert [rank["state"] for rank in ranks] == [2 * sum(first.values()), 2 * sum(second.values())]
    assert ranks[0]["micro"] == 4  # two for each of the pipeline's ranks
    same = recipe(NextWord(kind="tied-llama"), steps=3, epochs=None, precision="fp64")
    alone = samestep.train(same, folder=tmp_path / "alone", log=())
    assert result.losses == pytest.approx(alone.losses, rel=1e-10)
    assert result.metrics == pytest.approx(alone.metrics, rel=1e-6)  # which are of float32
    _check_schedule(result.folder)


def _check_schedule(folder: Path) -> None:
    schedule = json.loads((folder / "schedule.json").read_text(encoding="utf-8"))
    assert (schedule["layout"], schedule["step"], schedule["micro_batches"]) == ("pp2", 2, 4)
    for rank, spans in enumerate(schedule["ranks"]):
        assert sorted((s["kind"], s["stage"], s["micro_batch"]) for s in spans) == sorted(
            (kind, rank, number) for kind in "FB" for number in range(4)
        )
        assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(spans))
    ends = {(s["kind"], s["stage"], s["micro_batch"]): s for rank in schedule["ranks"] for s in rank}
    for number in range(4):
        assert ends["F", 0, number]["end"] <= ends["F", 1, number]["start"]
        assert ends["B", 1, number]["end"] <= ends["B", 0, number]["start"]
    assert 0 < schedule["bubble"]["measured"] < 1
    assert schedule["bubble"]["formula"] == pytest.approx(1 / 5)
    assert schedule["bubble"]["ideal"] == pytest.approx(1 / 5)
    _check_picture((folder / "schedule.svg").read_text(encoding="utf-8"), schedule)


def _check_picture(svg: str, schedule: dict[str, Any]) -> None:
    import xml.etree.ElementTree as ElementTree

    root = ElementTree.fromstring(svg)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    # A box each in the picture of the step and in that of the ideal.
    assert titles.count("backward, stage 1, micro-batch 3") == 2
    assert len(titles) == 1 + 2 * 2 * 8
    assert {"rank 0", "rank 1", "forward", "backward", "idle"} <= set(texts)
    assert any(f"idle {schedule['bubble']['measured']:.1%}" in str(text) for text in texts)


@pytest.mark.slow
def test_shards_of_a_pipeline_take_the_same_step_and_reduce_gradients_once_a_step(tmp_path: Path) -> None:
    how = {name: {"engine": Counted(tmp_path / name)} for name in ("few", "many")}
    for name in how:
        (tmp_path / name).mkdir()
    cases: dict[str, Case] = {
        "few": (SMALL, "pp2 fsdp2", how["few"]),
        "many": (SMALL, "pp2 fsdp2", {**how["many"], "micro_batch": 1}),
    }
    assert same(prove(cases, steps=2), list(cases)) == {}
    few, many = (written(tmp_path / name) for name in cases)
    assert few[0]["micro"] < many[0]["micro"]
    for before, after in zip(few, many, strict=True):
        assert before["reduced"] == after["reduced"] > 0


@pytest.mark.parametrize("precision", ["bf16"])
@pytest.mark.slow
def test_mixed_precision_trains(tmp_path: Path, precision: Any) -> None:
    task = NextWord(kind="tied-llama", dropout=0)
    plain = samestep.train(recipe(task, steps=4, epochs=None), folder=tmp_path / "plain", log=())
    for layout in ["pp2", "pp2 schedule=interleaved-zero-bubble"]:
        mixed = samestep.train(
            recipe(task, steps=4, epochs=None, precision=precision),
            layout=layout,
            folder=tmp_path / layout,
            threads=1,
            log=(),
        )
        assert mixed.losses == pytest.approx(plain.losses, rel=2e-2)
        assert mixed.losses != plain.losses


def message(task: samestep.Task, layout: str, **values: Any) -> str:
    run = {name: values.pop(name) for name in ("cut_at", "micro_batch") if name in values}
    with pytest.raises(samestep.UserError) as error:
        samestep.verify(recipe(task, **values), layout=layout, threads=1, check=False, **run)
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("pp2 stages=2", "schedule 1f1b runs 1 stage a rank, not 2; use schedule=interleaved-1f1b"),
        ("pp2 schedule=zbv-zero-bubble stages=3", "runs 2 stages a rank, not 3; 4 stages over 2 ranks are what"),
        ("pp2 fsdp2 schedule=zbv-zero-bubble", "shards of parameters would be put away in between; use zero1, or"),
        ("pp2 schedule=interleaved-zero-bubble recompute=full", "recompute=full would compute every block again"),
        (
            "pp2 cp2 tp2 sequence=split",
            "before the first split alone; use sequence=whole, or a layout without pp or cp",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_process_starts(layout: str, said: str) -> None:
    assert said in message(Points(), layout)


def test_cut_at_without_a_pipeline_is_refused() -> None:
    assert 'run.cut_at names pipeline stages, and layout "dp2" has none' in message(Points(), "dp2", cut_at=("1",))


def test_a_pipeline_wants_an_example() -> None:
    mesh: Any = None  # not looked at before the example is
    with pytest.raises(samestep.UserError, match=r'layout "pp2" cuts the model itself, .*example=inputs'):
        spread(
            nn.Linear(2, 2),
            Layout(pipeline=2),
            mesh,
            torch.device("cpu"),
            options=Options(),
            autocast=contextlib.nullcontext,
            details=ModelDetails(),
        )


class Alone:
    """A model's plan, as every rank of a pipeline makes it."""

    def __init__(self, task: samestep.Task, layout: str, cut_at: tuple[str, ...] = ()) -> None:
        from samestep.parallel.pipeline.partition import make_plan
        from samestep.parallel.trace import trace

        model = task.model()
        keep_no_cache(model)
        inputs = samestep.Batch(*task.collate([task.train_set()[index] for index in range(2)])).inputs
        self.plan = make_plan(model, Layout.parse(layout), trace(model, inputs), cut_at)


@pytest.mark.parametrize(
    ("task", "layout", "cut_at", "said"),
    [
        (NextWord(kind="llama"), "pp5", (), "5 pipeline stages for 4 layers; use 4 stages or fewer"),
        (
            NextWord(kind="llama"),
            "pp2",
            ("model.layer.1",),
            'no layer "model.layer.1"; did you mean "model.layers.1"',
        ),
        (NextWord(kind="llama"), "pp3", ("model.layers.1",), "1 name, which makes 2 stages; the layout has 3; use 2"),
        (NextWord(kind="llama"), "pp2", ("model.layers.0",), "the first layer of a stage but the first, in order"),
        (tasks.Keeping(), "pp2", (), "last takes a tensor that layers.0 computes and does not return"),
        (tasks.Keeping(), "pp2", ("layers.1",), "last takes a tensor that layers.0 computes and does not return"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_model_that_cannot_be_cut_so_is_refused_with_the_reason(
    task: samestep.Task, layout: str, cut_at: tuple[str, ...], said: str
) -> None:
    with pytest.raises(samestep.UserError) as error:
        Alone(task, layout, cut_at)
    assert said in str(error.value)


def test_a_refusal_in_the_ranks_is_one_line() -> None:
    assert message(tasks.Keeping(), "pp2").startswith(
        'layout "pp2": the model can\'t be cut, since last takes a tensor that layers.0 computes'
    )


def test_what_a_stage_needs_is_found_in_the_forward() -> None:
    plan = Alone(NextWord(kind="gpt2"), "pp2").plan
    assert plan.modules["transformer.wte"] == plan.modules["lm_head"] == {0, 1}  # tied
    assert plan.modules["transformer.wpe"] == {0}
    assert plan.modules["transformer.ln_f"] == {1}
    conditioned = Alone(tasks.Conditioned(), "pp2").plan
    assert conditioned.modules["condition"] == {0}
    assert conditioned.parameters["position"] == {0}
    assert [conditioned.calls[given.caller].unit for given in conditioned.handed_on[0]] == ["condition", "layers.1"]


def test_layers_in_the_stages_of_a_model_are_cut_where_these_are_too_few() -> None:
    assert [block.name for block in Alone(Tokens(name="stages"), "pp2").plan.blocks] == ["layers.0", "layers.1"]
    blocks = {block.name for block in Alone(Tokens(name="stages"), "pp4").plan.blocks}
    assert {"layers.0.layers.0", "layers.0.layers.1"} <= blocks
    # The parts of an ordinary block are no layers in a row.
    with pytest.raises(samestep.UserError, match="3 pipeline stages for 2 layers; use 2 stages or fewer"):
        Alone(Tokens(name="placed"), "pp3")


def test_the_hidden_state_must_have_a_shape_that_no_value_decides() -> None:
    with pytest.raises(samestep.RankFailedError, match="a pipeline needs a shape that no value decides"):
        samestep.verify(recipe(tasks.Shortening()), layout="pp2", threads=1)


@pytest.mark.slow
def test_memory_balance_counts_what_is_in_flight() -> None:
    task = NextWord(kind="llama", layers=16)
    assert Alone(task, "pp2").plan.starts == [0, 8]
    # The first rank keeps the activations of twice as many micro-batches.
    assert Alone(task, "pp2 balance=memory").plan.starts == [0, 7]
