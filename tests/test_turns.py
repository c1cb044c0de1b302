"""Steps in turns, losses of several terms, and gradients of gradients: the same step under every layout that can."""

import json
import re
from collections.abc import Sequence
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


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(task: samestep.Task, **more: Any) -> samestep.Recipe:
    schedule = samestep.Schedule(decay="linear")
    return samestep.Recipe(
        **{"task": task, "batch": 13, "steps": 4, "clip": 1.0, "schedule": schedule, **more},
    )


@pytest.mark.timeout(180)
def test_turns_terms_and_penalties_take_the_same_step_on_two_ranks() -> None:
    gan, normed, penalized = (
        recipe_of(task) for task in (turns.Gan(every=2), turns.Gan(norm=True), turns.PenalizedInForward())
    )
    terms, of_pairs, deep = (
        recipe_of(task) for task in (several.TwoTerms(), several.TermsOfPairs(), several.DeepTerms())
    )
    smooth, normed_slope = (recipe_of(penalty_tasks.Smooth(norm=norm)) for norm in (False, True))
    plan = {"tensor_plan": {"generator.0": "column", "generator.2": "row"}}
    assert_same_steps(
        [
            (gan, "dp2", {"micro_batch": 3}),
            (gan, "zero1x2", {}),
            (gan, "fsdp2", {"micro_batch": 3}),
            (gan, "tp2", plan),
            (normed, "dp2", {}),
            (penalized, "zero1x2", {}),
            (terms, "dp2", {"micro_batch": 2}),
            (of_pairs, "dp2", {"micro_batch": 2}),
            (terms, "fsdp2", {}),
            (deep, "pp2", {"micro_batch": 2}),
            (smooth, "tp2", {}),
            (normed_slope, "dp2", {}),
        ],
        steps=3,
        dropout=True,
    )


def test_a_gan_in_turns_takes_the_steps_that_a_plain_loop_takes(tmp_path: Path) -> None:
    """Two optimizers by hand, one process, the same samples: the same weights."""
    task = turns.Gan()
    task.model = lambda: turns.Rivals(dropout=0.0, noise=False)
    recipe = samestep.Recipe(
        task=task, batch=16, steps=5, precision="fp64", optimizer=samestep.SGD(lr=0.05, momentum=0.9)
    )
    task.turns = lambda: [
        samestep.Turn(
            name="discriminator",
            parameters=["discriminator.*"],
            loss=task.tell_apart,
            optimizer=samestep.SGD(lr=0.02),
        ),
        samestep.Turn(name="generator", parameters=["generator.*"], loss=task.deceive),
    ]
    result = samestep.train(recipe, folder=tmp_path / "run", threads=1, device="cpu")
    torch.manual_seed(0)
    model = task.model().double()
    first = torch.optim.SGD(model.discriminator.parameters(), lr=0.02)
    second = torch.optim.SGD(model.generator.parameters(), lr=0.05, momentum=0.9)
    from samestep.data.order import SampleOrder

    order = SampleOrder(size=96, batch=16, seed=0)
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
    assert result.losses == pytest.approx(losses, rel=1e-12)
    found = load_file(result.model_file)
    for name, value in model.state_dict().items():
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


class TwoKinds(turns.Gan):
    def turns(self) -> Sequence[samestep.Turn]:
        first, second = super().turns()
        kwargs = {"name": "generator", "parameters": second.parameters, "loss": second.loss}
        return [first, samestep.Turn(optimizer=samestep.SGD(lr=0.1), **kwargs)]  # pyright: ignore


class AMean(turns.Gan):
    def deceive(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return F.softplus(-output).mean(), 1


class OtherTerms(several.TwoTerms):
    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return {"class": super().loss(output, batch)["class"]}


class OnePair(several.TwoTerms):
    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return super().loss(output, batch)["class"]


WRONG: dict[str, tuple[samestep.Task, str, dict[str, Any], str]] = {
    "no turn": (Forgotten(), "dp2", {}, r"the parameter generator\.4\.weight belongs to none of the turns"),
    "two of a name": (Twice(), "dp2", {}, "two turns are called discriminator"),
    "two kinds": (TwoKinds(), "dp2", {}, "turn discriminator has AdamW and turn generator has SGD; use one kind"),
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
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe_of(task), layout=layout, **{"threads": 1, **run})
    assert re.search(words, str(caught.value)), str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fsdp2", r"takes gradients through layers\.1 .*use dp2, or zero1x2"),
        ("pp2", r"with respect to what an earlier pipeline stage has.*use dp2 or tp2 in place of pp2"),
    ],
)
def test_layouts_without_gradients_of_gradients_say_so(layout: str, words: str) -> None:
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe_of(penalty_tasks.Smooth()), layout=layout, threads=1)
    assert re.search(words, str(caught.value)), str(caught.value)
