"""Any optimizer by name or function, groups of parameters, averages of weights: the same step under every layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import Words
from optimizer_tasks import Counting, Lars, Noisy, Together, nothing, signs
from proving import prove, same
from resuming import job_of, largest_difference, train_all
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep import Average, Checkpointing, Group, NamedOptimizer, jobfile
from samestep.engines.registry import resolve
from samestep.launch import local
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.options import Options
from samestep.parallel.optimizer.kinds import Shapes, kind_of
from samestep.training.session import Session

pytestmark = pytest.mark.timeout(300)

LANGUAGE = Path(__file__).parent.parent / "examples" / "proof" / "language.yaml"
MUON = NamedOptimizer(name="torch.optim.Muon", lr=0.02, weight_decay=0.1, args={"momentum": 0.9})
MATRICES = Group(parameters=("*layers*",), dims=2, optimizer=MUON)


def llama(**values: Any) -> samestep.Recipe:
    """A tiny Llama, whose hidden matrices Muon steps and the rest AdamW."""
    given = jobfile.load(LANGUAGE).job.recipe
    own = {name: getattr(given, name) for name in given.__dataclass_fields__}
    own |= {"model": {**given.model, "layers": 2}, "batch": 7, "groups": (MATRICES,), "epochs": None, "steps": 6}
    return samestep.Recipe(**{**own, **values})


class Shifted(Points):
    """With a bias before a softmax over features that gives them all the same, so its gradient is rounding alone."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Shift(), nn.Softmax(-1), nn.Linear(16, self.classes))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def points(**values: Any) -> samestep.Recipe:
    settings: dict[str, Any] = {"task": Points(samples=64, held_out=7), "batch": 13, "steps": 4, "clip": 1.0}
    return samestep.Recipe(**{**settings, **values})


TRAINED = llama()
FACTORED = points(optimizer=NamedOptimizer(name="torch.optim.Adafactor", lr=0.05))
SHIFTED = points(
    task=Shifted(samples=64, held_out=7), optimizer=NamedOptimizer(name="torch.optim.Adafactor", lr=0.05)
)
NESTEROV = points(optimizer=NamedOptimizer(name="torch.optim.NAdam", lr=0.01, args={"betas": [0.8, 0.99]}))
TRUST = points(optimizer=NamedOptimizer(name=Lars, lr=0.05))
EXPERTS = samestep.Recipe(
    task=Words(name="list"), batch=7, clip=0.5, groups=(Group(parameters=("*",), dims=2, optimizer=MUON),)
)
GROUPED = points(
    groups=(
        Group(parameters=("0.*",), lr=0.1, weight_decay=0.2, schedule=samestep.Schedule(warmup=2)),
        Group(parameters=("*.bias",), optimizer=samestep.SGD(lr=0.3, momentum=0.9)),
    ),
    schedule=samestep.Schedule(warmup=1, decay="cosine"),
    average=Average(decay=0.6, start=1),
)

TWO: Mapping[str, Any] = {
    **{f"muon {layout}": (TRAINED, layout, {}) for layout in ("fsdp2", "tp2")},
    "adafactor fsdp2": (FACTORED, "fsdp2", {}),
    "groups zero1x2": (GROUPED, "zero1x2", {}),
}
MORE_OF_TWO: Mapping[str, Any] = {
    **{
        f"muon {layout}": (TRAINED, layout, {})
        for layout in ("dp2", "zero1x2", "zero2x2", "cp2", "pp2", "tp2 sequence=split")
    },
    "nadam fsdp2 offload=optimizer": (NESTEROV, "fsdp2 offload=optimizer", {}),
    "lars fsdp2": (TRUST, "fsdp2", {}),
    "groups shared": (points(groups=GROUPED.groups), "dp2", {"share_replicas": True}),
    "muon of experts": (EXPERTS, "ep2", {}),
    "muon offloaded": (TRAINED, "fsdp2 offload=optimizer", {}),
    "muon of a replica offloaded": (TRAINED, "dp2 offload=optimizer", {}),
    **{f"adafactor {layout}": (FACTORED, layout, {}) for layout in ("zero1x2", "tp2")},
    **{f"adafactor of rounding {layout}": (SHIFTED, layout, {}) for layout in ("dp2", "fsdp2")},
    **{f"nadam {layout}": (NESTEROV, layout, {}) for layout in ("zero1x2", "tp2")},
    "lars dp2": (TRUST, "dp2", {}),
    **{f"groups {layout}": (GROUPED, layout, {}) for layout in ("dp2", "fsdp2")},
}


def test_steps_are_those_of_one_process() -> None:
    proofs = prove(TWO, steps=3)
    assert same(proofs, list(TWO)) == {}


@pytest.mark.slow
def test_steps_of_more_layouts_are_those_of_one_process() -> None:
    proofs = prove(MORE_OF_TWO, steps=3)
    assert same(proofs, list(MORE_OF_TWO)) == {}


@pytest.mark.slow
def test_muon_is_the_same_where_a_matrix_is_cut_twice() -> None:
    for layouts in (("fsdp2 tp2", "zero1x2 tp2", "dp2 fsdp2", "tp4", "pp2 tp2"), ("pp2 fsdp2 tp2",)):
        proofs = prove({layout: (TRAINED, layout, {}) for layout in layouts}, steps=3)
        assert same(proofs, layouts) == {}


def naive(layout: str) -> float:
    """How far Muon's steps are from one process's if every rank steps the shards that it has."""
    from samestep.parallel.optimizer import joined
    from samestep.parallel.optimizer.kinds import OptimizerKind

    kept = joined.kind_of
    joined.kind_of = lambda *_: OptimizerKind(by_number=True, alone=True, draws=False, settings_change=[])
    try:
        return samestep.verify(TRAINED, layout, steps=2, check=False, threads=1).max_relative_difference["parameters"]
    finally:
        joined.kind_of = kept


def _naive(*_: Any) -> float:
    return naive("fsdp2")


@pytest.mark.slow
def test_muon_of_shards_would_be_another_step() -> None:
    assert local.start(_naive, (), 2) > 1e-3


KINDS = {
    torch.optim.AdamW: (True, True, False),
    torch.optim.Rprop: (True, True, False),
    torch.optim.Adafactor: (False, True, False),
    Lars: (False, True, False),
    Together: (True, False, False),
    Noisy: (True, True, True),
}


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_what_kind_an_optimizer_is_is_found_by_trying(made: Any) -> None:
    shapes = [Shapes(settings={"lr": 1e-3}, shapes=[torch.Size((8, 5)), torch.Size((7,))])]
    kind = kind_of(lambda groups: made(groups), shapes, "it")
    assert (kind.by_number, kind.alone, kind.draws) == KINDS[made]


def test_an_optimizer_of_a_function_steps_as_it_would_alone(tmp_path: Path) -> None:
    named = points(optimizer=NamedOptimizer(name=signs, lr=0.05), clip=None)
    plain = points(optimizer=samestep.SGD(lr=0.05, momentum=0.9), clip=None)
    mine, theirs = (
        samestep.train(recipe, folder=tmp_path / str(number), threads=1).losses
        for number, recipe in enumerate((named, plain))
    )
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_file_beside_the_job_may_have_the_optimizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef make(params, lr): return torch.optim.SGD(params, lr=lr)\n")
    job = tmp_path / "job.yaml"
    job.write_text("recipe: {task: regression, optimizer: {name: ./mine.py:make, lr: 0.01}, steps: 2}\n")
    optimizer = jobfile.load(job).job.recipe.optimizer
    assert optimizer.name == f"{tmp_path}/mine.py:make"


# Checkpoints.


@pytest.mark.slow
def test_states_go_on_under_another_layout(tmp_path: Path) -> None:
    """Muon's momentum and the average of the weights, saved by shards and slices, read by others."""
    recipe = llama(precision="fp64", average=Average(decay=0.7, start=1))
    (alone,) = train_all([job_of(recipe, "single", tmp_path / "alone")])
    sources, targets = ("fsdp2", "tp2"), ("single", "fsdp2", "zero1x2", "pp2", "dp2 offload=optimizer")
    saving = [job_of(recipe, s, tmp_path / "from" / s, checkpoint=Checkpointing(every=3)) for s in sources]
    saved = dict(zip(sources, train_all(saving), strict=True))
    resumed = train_all(
        [
            job_of(
                recipe,
                target,
                tmp_path / source / target,
                checkpoint=Checkpointing(resume=str(saved[source].folder / "checkpoints" / "step-3")),
            )
            for source in sources
            for target in targets
        ]
    )
    for result in resumed:
        assert result.first_step == 3
        assert largest_difference(result.losses, alone.losses[3:]) < 1e-9
        for name, value in alone.metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-9)  # of the average
    same_layout = next(r for r in resumed if r.folder == tmp_path / "fsdp2" / "fsdp2")
    assert same_layout.losses == saved["fsdp2"].losses[3:]


def test_a_count_of_pythons_comes_back(tmp_path: Path) -> None:
    (whole,) = train_all([job_of(TRUST, "single", tmp_path / "whole", checkpoint=Checkpointing(every=2))])
    again = Checkpointing(resume=str(whole.folder / "checkpoints" / "step-2"))
    (resumed,) = train_all([job_of(TRUST, "single", tmp_path / "again", checkpoint=again)])
    assert resumed.losses == whole.losses[2:]


# The average of the weights.


def test_the_average_is_what_is_evaluated_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    decay, steps = 0.8, 4
    recipe = points(average=Average(decay=decay, start=1, every=2), optimizer=samestep.SGD(lr=0.1), precision="fp64")
    result = samestep.train(recipe, folder=tmp_path / "run", threads=1, checkpoint=Checkpointing())
    weights = []
    for count in (1, 3):
        plain = points(optimizer=samestep.SGD(lr=0.1), precision="fp64", steps=count)
        samestep.train(plain, folder=tmp_path / str(count), threads=1)
        weights.append(load_file(tmp_path / str(count) / "model.safetensors"))
    exported = load_file(result.folder / "model.safetensors")
    assert result.steps == steps
    for name, value in exported.items():
        wanted = decay * weights[0][name] + (1 - decay) * weights[1][name]
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    evaluated = samestep.evaluate(recipe, result.folder / "checkpoints")
    assert evaluated["accuracy"] == result.metrics["accuracy"]
    model = samestep.load_model(recipe, result.folder / "checkpoints")
    torch.testing.assert_close(model.state_dict()["0.weight"], exported["0.weight"].float(), rtol=1e-5, atol=1e-6)


# A loop of one's own.


def _looped(layout: str, world: World) -> list[float]:
    torch.manual_seed(0)
    task = Points(samples=64, held_out=7)
    model = task.model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]
    losses = []
    session = Session(
        world=world,
        layout=Layout.parse(layout),
        engine=resolve("native"),
        options=Options(precision="fp64", average=Average(decay=0.5)),
    )
    model, _ = session.prepare(model, optimizers)
    for batch in session.batches(task.pairs, batch=13, collate=task.collate, steps=4):
        losses.append(session.step(batch, task.loss).loss.item())
    found = session.evaluate(task.held_out, collate=task.collate, metrics=task.metrics())
    return [*losses, found["accuracy"]]


def _each_loop(layouts: tuple[str, ...]) -> list[list[float]]:
    with join(device="cpu", threads=1) as world:
        return [_looped(layout, world) for layout in layouts]


def test_a_loop_of_ones_own_may_have_two_optimizers() -> None:
    (alone,) = _each_loop(("single",))
    for found in local.start(_each_loop, (("dp2", "fsdp2", "zero1x2"),), 2):
        assert found == pytest.approx(alone, rel=1e-12)


# Mistakes.

NAMED: Mapping[str, tuple[dict[str, Any], str]] = {
    "no such class": ({"name": "torch.optim.Moun"}, 'Moun is not in torch.optim; did you mean "Muon"'),
    "no such module": ({"name": "nowhere.at:all"}, "nowhere.at can't be imported"),
    "no such file": ({"name": "./nowhere.py:make"}, "recipe.optimizer.name: no file nowhere.py"),
    "no such argument": (
        {"name": "torch.optim.RAdam", "args": {"beta": 1}},
        'unknown key "recipe.optimizer.args.beta": torch.optim.RAdam takes no beta; did you mean "betas"',
    ),
    "a wrong type": (
        {"name": "torch.optim.RAdam", "args": {"eps": "little"}},
        "args.eps is 'little'; it should be a",
    ),
    "a wrong value": ({"name": "torch.optim.RAdam", "args": {"betas": [2, 3]}}, "Invalid beta parameter at index 0"),
    "one level too deep": ({"name": "torch.optim.RAdam", "args": {"lr": 1}}, "must stand one level higher"),
    "a closure": ({"name": "torch.optim.LBFGS"}, "wants a closure"),
    "sparse gradients": ({"name": "torch.optim.SparseAdam"}, "gradients are dense here"),
    "no optimizer": ({"name": nothing}, "gave a NoneType; it must give a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("case", NAMED)
def test_an_optimizer_that_cant_be_is_told_in_one_sentence(case: str) -> None:
    values, message = NAMED[case]
    with pytest.raises(samestep.UserError) as found:
        samestep.train(points(optimizer=NamedOptimizer(**values)), layout="dp2", device="cpu")
    assert message in str(found.value)
    assert "\n" not in str(found.value)


LAYOUTS: Mapping[str, tuple[samestep.Recipe, str, dict[str, Any], str]] = {
    "noise": (points(optimizer=NamedOptimizer(name=Noisy)), "dp2", {}, "draws random numbers"),
    "all at once": (points(optimizer=NamedOptimizer(name=Together)), "fsdp2", {}, "use dp2"),
    "in groups": (
        points(optimizer=NamedOptimizer(name=Counting)),
        "dp2",
        {"checkpoint": Checkpointing()},
        "keeps count in its groups, which a checkpoint does not hold",
    ),
    "rows of replicas": (TRUST, "dp2", {"share_replicas": True}, "use share_replicas: false"),
    "an average of shared replicas": (points(average=Average()), "dp2", {"share_replicas": True}, "one copy of the"),
    "another engine": (NESTEROV, "dp2", {"engine": "parameter-server"}, "takes adamw or sgd"),
    "groups of another engine": (GROUPED, "dp2", {"engine": "parameter-server"}, "use engine native"),
    "an average of no step": (
        points(average=Average(start=4)),
        "dp2",
        {},
        "recipe.average.start is 4, and the training takes 4 steps, so it would average nothing; use a start below 4",
    ),
    "an average of another engine": (points(average=Average()), "dp2", {"engine": "parameter-server"}, "no average"),
    "vectors": (points(optimizer=MUON), "dp2", {}, "2D parameters"),
    "no match": (points(groups=(Group(parameters=("layers*",), lr=1),)), "dp2", {}, '"layers*" matches no parameter'),
    "no dims": (points(groups=(Group(parameters=("0.*",), dims=4, lr=1),)), "dp2", {}, "has 4 dimensions"),
    "taken": (
        points(groups=(Group(parameters=("*",), lr=1), Group(parameters=("0.*",), lr=2))),
        "dp2",
        {},
        "recipe.groups.0 has all parameters that match",
    ),
    "no decay": (
        points(groups=(Group(parameters=("*",), weight_decay=0.1, optimizer=NamedOptimizer(name=Lars)),)),
        "dp2",
        {},
        "recipe.groups.0.weight_decay is given, and Lars takes no weight_decay",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_a_layout_or_engine_cant_have_is_told_before_ranks_start(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, layout, run, message = LAYOUTS[case]

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(local, "start", start)
    with pytest.raises(samestep.UserError) as found:
        samestep.train(recipe, layout=layout, device="cpu", **run)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "a group that says nothing": ({"groups": [{"parameters": "*"}]}, "the group changes nothing"),
    "a group of nothing": ({"groups": [{"parameters": [], "lr": 1}]}, "should have at least 1 items"),
    "a group without names": ({"groups": [{"lr": 1}]}, "recipe.groups.0.parameters is missing"),
    "a key in a group": ({"groups": [{"parameters": "*", "rate": 1}]}, 'unknown key "recipe.groups.0.rate"'),
    "a decay of one": ({"average": {"decay": 1.0}}, "recipe.average.decay is 1.0"),
    "every 0 steps": ({"average": {"every": 0}}, "recipe.average.every is 0"),
    "an average of ranks": ({"average": {}, "communication": {"kind": "local-sgd"}}, "their own weights; use one"),
    "one bit of muon": (
        {"groups": [{"parameters": "*", "optimizer": {"name": "sgd"}}], "communication": {"kind": "one-bit-adam"}},
        "optimizer is sgd; use adamw",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_key_is_told(case: str) -> None:
    from samestep.validation import checked

    values, message = WRONG[case]
    with pytest.raises(samestep.UserError) as found:
        checked(samestep.Recipe, {"task": "regression", **values}, prefix=("recipe",))
    assert message in str(found.value)


def test_a_frozen_model_has_no_group() -> None:
    from samestep.training.optimizer import OptimizerPlan

    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(samestep.UserError, match="are frozen"):
        OptimizerPlan(points(groups=(Group(parameters=("*",), lr=1),)), model)
