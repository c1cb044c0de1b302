"""Steps in turns, losses of several terms, and gradients of gradients: the same step under every layout that can."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import penalty_tasks
import pytest
import several_loss_tasks as several
import torch
import torch.nn.functional as F
import turn_tasks as turns
from proving import assert_same_steps
from safetensors.torch import load_file
from torch import Tensor

import samestep
from samestep.contract.check import check_contract
from samestep.job import Job
from samestep.launch import local
from samestep.layout import Layout


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(task: samestep.Task, **more: Any) -> samestep.Recipe:
    schedule = samestep.Schedule(decay="linear")
    return samestep.Recipe(
        **{"task": task, "batch": 13, "steps": 4, "clip": 1.0, "schedule": schedule, **more},
    )


class Sharpened(penalty_tasks.Smooth):
    """Takes a gradient of what the loss makes of the output, which no layer of the model is in."""

    def loss(self, output: Any, batch: samestep.Batch, **_: Any) -> tuple[Tensor, int]:
        score, _ = output
        (slope,) = torch.autograd.grad(score.square().sum(), score, create_graph=True)
        return ((score - batch.targets).square() + slope.square()).sum(), len(score)


PLAN = {"tensor_plan": {"generator.0": "column", "generator.2": "row"}}


def unlike() -> tuple[samestep.Recipe, samestep.Recipe, samestep.Recipe]:
    """Turns with optimizers of other kinds: built in, of matrices, and such as move what has no gradient."""
    named = samestep.NamedOptimizer
    return (
        recipe_of(turns.Unlike(samestep.SGD(lr=0.05, momentum=0.9), samestep.AdamW(lr=0.01))),
        recipe_of(turns.Unlike(named(name="torch.optim.RMSprop"), named(name="torch.optim.Muon", lr=0.02))),
        recipe_of(turns.Unlike(named(name=turns.Restless), named(name=turns.Restless, lr=0.02))),
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_turns_terms_and_penalties_take_the_same_step_on_two_ranks() -> None:
    _, matrices, _ = unlike()
    assert_same_steps(
        [
            (matrices, "fsdp2", {}),
            (recipe_of(turns.Gan(every=2)), "tp2", PLAN),
            (recipe_of(several.DeepTerms()), "pp2", {"micro_batch": 2}),
            (recipe_of(penalty_tasks.Smooth()), "tp2", {}),
        ],
        steps=3,
        dropout=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_turns_terms_and_penalties_take_the_same_step_on_two_ranks() -> None:
    kinds, matrices, restless = unlike()
    gan, terms = recipe_of(turns.Gan(every=2)), recipe_of(several.TwoTerms())
    assert_same_steps(
        [
            (kinds, "dp2", {"micro_batch": 3}),
            (kinds, "fsdp2", {}),
            (matrices, "zero1x2", {}),
            (matrices, "tp2", PLAN),
            (restless, "zero1x2", {}),
            (restless, "fsdp2", {}),
            (gan, "dp2", {"micro_batch": 3}),
            (gan, "zero1x2", {}),
            (gan, "fsdp2", {"micro_batch": 3}),
            (recipe_of(turns.PenalizedInForward()), "zero1x2", {}),
            (recipe_of(turns.Gan(norm=True)), "dp2", {}),
            (terms, "dp2", {"micro_batch": 2}),
            (terms, "fsdp2", {}),
            (recipe_of(several.TermsOfPairs()), "dp2", {"micro_batch": 2}),
            (recipe_of(Sharpened()), "fsdp2", {}),
            (recipe_of(penalty_tasks.Smooth(norm=True)), "dp2", {}),
        ],
        steps=3,
        dropout=True,
    )


PLAIN: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "of one kind": (samestep.SGD(lr=0.02), lambda of: torch.optim.SGD(of, lr=0.02)),
    "of two kinds": (
        samestep.NamedOptimizer(name=turns.Restless, lr=0.02),
        lambda of: turns.Restless(of, lr=0.02),
    ),
}


@pytest.mark.parametrize("kinds", PLAIN)
def test_a_gan_in_turns_takes_the_steps_that_a_plain_loop_takes(kinds: str, tmp_path: Path) -> None:
    """Two optimizers by hand, one process, the same samples: the same weights, and the same average of them."""
    optimizer, plain = PLAIN[kinds]
    task = turns.Gan()
    task.model = lambda: turns.Rivals(dropout=0.0, noise=False)
    recipe = samestep.Recipe(
        task=task, batch=16, steps=5, precision="fp64", optimizer=samestep.SGD(lr=0.05, momentum=0.9)
    )
    if kinds == "of two kinds":
        recipe = replace(recipe, average=samestep.Average(decay=0.6))
    task.turns = lambda: [
        samestep.Turn(
            name="discriminator",
            parameters=["discriminator.*"],
            loss=task.tell_apart,
            optimizer=optimizer,
        ),
        samestep.Turn(name="generator", parameters=["generator.*"], loss=task.deceive),
    ]
    result = samestep.train(recipe, folder=tmp_path / "run", threads=1, device="cpu")
    torch.manual_seed(0)
    model = task.model().double()
    first = plain(model.discriminator.parameters())
    second = torch.optim.SGD(model.generator.parameters(), lr=0.05, momentum=0.9)
    from samestep.data.order import SampleOrder

    order = SampleOrder(size=96, batch=16, seed=0)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    losses: list[float] = []
    for step in range(5):
        real = task.points[order.global_batch(step).tolist()].double()
        on_real, on_fake = model(real, "discriminator")
        loss = (F.softplus(-on_real) + F.softplus(on_fake)).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        deceived = F.softplus(-model(real, "generator")).mean()
        second.zero_grad()
        deceived.backward()
        second.step()
        losses.append((loss + deceived).item())
        for name, value in model.state_dict().items():
            # It begins with the weights after the first step.
            average[name].lerp_(value, 0.4 if recipe.average is not None and step else 1.0)
    assert result.losses == pytest.approx(losses, rel=1e-12)
    found = load_file(result.model_file)
    for name, value in average.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(120)
def test_a_gan_goes_on_from_a_checkpoint_under_another_layout(tmp_path: Path) -> None:
    recipe = recipe_of(turns.Gan(every=2), precision="fp64", steps=6)
    run = {"threads": 1, "device": "cpu"}
    checkpoints = samestep.Checkpointing(every=3, folder=tmp_path / "saved")
    whole = samestep.train(recipe, folder=tmp_path / "whole", checkpoint=checkpoints, **run)
    rest = samestep.Checkpointing(folder=tmp_path / "rest", resume=str(tmp_path / "saved" / "step-3"))
    resumed = samestep.train(recipe, layout="zero1x2", folder=tmp_path / "resumed", checkpoint=rest, **run)
    assert resumed.first_step == 3
    expected, found = load_file(whole.model_file), load_file(resumed.model_file)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [sorted(json.loads(line)["losses"]) for line in lines[:2]] == [
        ["discriminator"],
        ["discriminator", "generator"],
    ]


def test_terms_are_divided_by_their_own_counts_and_told_by_name(tmp_path: Path) -> None:
    task = several.TwoTerms()
    recipe = samestep.Recipe(task=task, batch=20, steps=1, precision="fp64", dropout=False)
    run = {"threads": 1, "device": "cpu", "micro_batch": 6}
    result = samestep.train(recipe, folder=tmp_path / "run", **run)
    torch.manual_seed(0)
    model = task.model().double().eval()
    from samestep.data.order import SampleOrder

    numbers = SampleOrder(size=60, batch=20, seed=0).global_batch(0)
    points, labels = (
        torch.stack(each) for each in zip(*(task.train_set()[n] for n in numbers.tolist()), strict=True)
    )
    output, some = model(points.double()), labels == 0
    of_class = F.cross_entropy(output[:, :-1], labels).item()
    distance = (output[some, -1] - 0.7).square().mean().item()
    told = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8"))
    assert told["losses"] == pytest.approx({"class": of_class, "distance": distance}, rel=1e-12)
    assert result.losses[0] == pytest.approx(of_class + 0.3 * distance, rel=1e-12)
    assert result.final_terms == pytest.approx(told["losses"], rel=1e-12)
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["final_losses"] == pytest.approx(told["losses"], rel=1e-12)


class Forgotten(turns.Gan):
    """Names no turn for the generator's last layer."""

    def turns(self) -> Sequence[samestep.Turn]:
        first, second = super().turns()
        return [
            first,
            samestep.Turn(name="generator", parameters=["generator.[0-2].*"], loss=second.loss),
        ]


class Twice(turns.Gan):
    def turns(self) -> Sequence[samestep.Turn]:
        first, _ = super().turns()
        return [first, first]


class WithLoss(turns.Gan):
    def turns(self) -> Sequence[samestep.Turn]:
        return super().turns()

    def loss(self, output: Any, batch: samestep.Batch) -> Any:
        return self.deceive(output, batch)


class AMean(turns.Gan):
    def deceive(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.softplus(-output).mean(), 1


class OtherTerms(several.TwoTerms):
    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return {"class": super().loss(output, batch)["class"]}


class OnePair(several.TwoTerms):
    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return super().loss(output, batch)["class"]


WRONG: dict[str, tuple[samestep.Task | samestep.Recipe, str, dict[str, Any], str]] = {
    "no turn": (Forgotten(), "dp2", {}, r"the parameter generator\.4\.weight belongs to none of the turns"),
    "two of a name": (Twice(), "dp2", {}, "two turns are called discriminator"),
    "a loss beside turns": (WithLoss(), "dp2", {}, r"WithLoss writes loss\(\), which is not used"),
    "no optimizer": (
        turns.Unlike("adam", samestep.SGD(lr=0.1)),
        "dp2",
        {},
        r"turn discriminator has a str as its optimizer; use samestep\.AdamW",
    ),
    "an optimizer of nowhere": (
        turns.Unlike(samestep.NamedOptimizer(name="torch.optim.Addam"), samestep.SGD(lr=0.1)),
        "dp2",
        {},
        r"turn discriminator: optimizer\.name is .*Addam is not in torch\.optim",
    ),
    "biases for Muon": (
        recipe_of(turns.Gan(), optimizer=samestep.NamedOptimizer(name="torch.optim.Muon", lr=0.02)),
        "dp2",
        {},
        r"generator\.0\.bias, of shape \(16,\)",
    ),
    "a loss of nothing": (
        turns.Detached(),
        "dp2",
        {},
        r"turn generator: the loss reaches none of its own parameters \(generator\.\*\), but discriminator\.0",
    ),
    "a mean": (AMean(), "dp2", {}, "turn generator: the loss counts 1 terms for 12 samples"),
    "a pipeline": (turns.Gan(), "pp2", {}, 'layout "pp2": the task\'s steps are taken in turns.*use dp2, fsdp2 or'),
    "turns elsewhere": (turns.Gan(), "dp2", {"engine": "accelerate"}, '"accelerate" takes no steps in turns'),
    "terms elsewhere": (several.TwoTerms(), "dp2", {"engine": "accelerate"}, '"accelerate": the loss has several'),
    "shared copies": (turns.Gan(), "dp2", {"share_replicas": True}, "in turns, and run.share_replicas is true"),
    "other terms": (OtherTerms(), "dp2", {}, "loss_weights names class, distance, and the loss gave class; use"),
    "no terms": (OnePair(), "dp2", {}, "loss_weights names class, distance, and the loss gave a tuple"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_turns_and_terms_is_told_before_a_rank_starts(name: str) -> None:
    task, layout, run, words = WRONG[name]
    recipe = task if isinstance(task, samestep.Recipe) else recipe_of(task)
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe, layout=layout, **{"threads": 1, **run})
    assert re.search(words, str(caught.value)), str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fsdp2", r"takes gradients through layers\.[01] .*use dp2, or zero1x2"),
        ("pp2", r"with respect to what an earlier pipeline stage has.*use dp2 or tp2 in place of pp2"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_layouts_without_gradients_of_gradients_say_so(
    layout: str, words: str, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rank starts, or where the contract is not checked in the first step."""
    if check:
        monkeypatch.setattr(local, "start", None)
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe_of(penalty_tasks.Smooth()), layout=layout, threads=1, check=check)
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    "task",
    [penalty_tasks.SmoothForward(norm=True), pytest.param(penalty_tasks.SmoothTogether(), marks=pytest.mark.slow)],
)
def test_a_forward_may_take_gradients(task: samestep.Task) -> None:
    assert samestep.verify(recipe_of(task), layout="dp2", steps=2, threads=1).same_step


def test_a_forward_that_takes_gradients_where_it_runs_without_a_graph_is_told_what_would_do() -> None:
    recipe = recipe_of(penalty_tasks.SmoothTogether())
    with pytest.raises(samestep.LayoutError, match=r"takes gradients in its forward.*use torch\.enable_grad\(\)"):
        samestep.verify(recipe, layout="dp2", steps=1, threads=1, micro_batch=2)
    recipe = recipe_of(penalty_tasks.SmoothTogether(graph=True))
    assert samestep.verify(recipe, layout="dp2", steps=1, threads=1, micro_batch=2).same_step


def test_check_names_the_layouts_without_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start", None)
    found = samestep.check(recipe_of(penalty_tasks.Smooth()), layouts=["zero2x2", "fsdp2", "pp2", "cp2"])
    assert found.kept
    told = [row.reason or "" for row in found.layouts]
    for words, text in zip(("zero1x2", "zero1x2", "pipeline stage", "no gradient of that"), told, strict=True):
        assert words in text


def test_gradients_behind_the_model_are_no_matter_for_a_layout() -> None:
    recipe = recipe_of(Sharpened())
    for layout in ("fsdp2", "pp2"):
        check_contract(Job(recipe=recipe), Layout.parse(layout), Sharpened())
