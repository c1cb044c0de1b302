"""Losses that couple samples, by `gather`: under every layout the step of one process with the whole batch."""

import functools
import re
from typing import Any

import coupled_tasks as coupled
import pytest
import torch
from proving import assert_same_steps
from small_tasks import Points
from torch import Tensor

import samestep
from samestep.tasks.losses import takes_gather

BATCH = 13  # which neither 2 nor 3 ranks share evenly


def recipe_of(task: samestep.Task, **more: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task, batch=BATCH, steps=3, clip=0.5, optimizer=samestep.AdamW(lr=0.01), **more)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_coupled_losses_take_the_same_step_on_two_ranks() -> None:
    pairs, rounds = recipe_of(coupled.Pairs()), recipe_of(coupled.TwoRounds())
    lines, layers = recipe_of(coupled.Lines()), recipe_of(coupled.Layers())
    grouped = {"micro_batch": 2, "group_by_length": True}
    assert_same_steps(
        [
            (pairs, "dp2", {}),
            (rounds, "dp2", {"micro_batch": 3}),
            (lines, "dp2", grouped),  # where the order of the rows is not that of the ranks
            (layers, "fsdp2", {"micro_batch": 2}),
            (layers, "pp2", {"micro_batch": 2}),
        ],
        steps=2,
        dropout=True,
    )


@pytest.mark.timeout(120)
def test_a_contrastive_loss_takes_the_same_step_on_three_ranks() -> None:
    pairs = recipe_of(coupled.Pairs())
    assert_same_steps([(pairs, "dp3", {"micro_batch": 2})], steps=2, dropout=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_coupled_losses_take_the_same_step_under_more_layouts() -> None:
    pairs, layers = recipe_of(coupled.Pairs()), recipe_of(coupled.Layers())
    cases = [(layers, layout, {"micro_batch": 2}) for layout in ("dp2 tp2", "pp2 dp2", "pp2 fsdp2", "pp2 tp2")]
    cases += [(pairs, "fsdp2 tp2", {}), (pairs, "zero1x2", {"micro_batch": 2}), (layers, "tp2", {"micro_batch": 4})]
    cases += [(pairs, "dp3", {}), (recipe_of(coupled.TwoRounds()), "fsdp2", {})]
    assert_same_steps(cases, steps=2, dropout=True)


def test_whether_a_loss_gathers_is_seen_of_functions_methods_and_what_wraps_them() -> None:
    def couples(output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone) -> None: ...

    def does_not(output: Any, batch: samestep.Batch) -> None: ...

    @functools.wraps(couples)
    def wrapped(*given: Any, **named: Any) -> None: ...

    for _ in range(2):  # the second time it is known
        assert takes_gather(couples)
        assert takes_gather(wrapped)
        assert takes_gather(functools.partial(couples, gather=samestep.alone))
        assert takes_gather(coupled.Pairs().loss)
        assert not takes_gather(does_not)
        assert not takes_gather(Points().loss)
        assert not takes_gather(max)  # without a signature


def test_one_process_gathers_over_micro_batches_what_plain_pytorch_has_at_once() -> None:
    """The first loss and the gradient's norm of micro-batches, beside plain PyTorch's of the whole batch."""
    task = coupled.Pairs()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with samestep.session("single", precision="fp64", micro_batch=3, threads=1, device="cpu") as session:
        session.prepare(model, optimizer)
        torch.manual_seed(0)
        plain = task.model().double()
        for module in (*model.modules(), *plain.modules()):
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        batches = session.batches(task.train_set(), batch=10, collate=task.collate, steps=1, shuffle=False)
        (report,) = (session.step(batch, task.loss) for batch in batches)
    inputs, targets = task.collate(task.samples[:10])
    output = plain(*(each.double() for each in inputs))
    total, count = task.loss(output, samestep.Batch(inputs, targets))
    (total / count).backward()
    norm = torch.stack([p.grad.square().sum() for p in plain.parameters() if p.grad is not None]).sum().sqrt()
    torch.testing.assert_close(report.loss, (total / count).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(report.grad_norm, norm, rtol=1e-12, atol=0)


class WholeLoss(coupled.Pairs):
    """Gives all rows' terms in every call, rather than those of its own samples."""

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        first, second = gather((output["first"], output["second"]))
        return (first @ second.T).logsumexp(1).sum(), len(first)


class WrongRows(coupled.Pairs):
    """Takes the first rows of what is gathered for its own."""

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        near = output["first"] @ gather(output["second"]).T
        return torch.nn.functional.cross_entropy(near, torch.arange(len(near)), reduction="sum"), len(near)


class NoRow(coupled.Pairs):
    """Gathers a temperature, which has no row a sample."""

    def loss(
        self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone
    ) -> tuple[Tensor, Tensor | int]:
        return gather(output)["first"].sum(), len(output["first"])


class Undeclared(coupled.Pairs):
    """Couples samples without saying so."""

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:  # pyright: ignore
        total, _ = super().loss(output, batch)
        return total, len(output["first"])


WRONG = {
    "all terms": (WholeLoss(), {}, r"counts 12 terms for 12 samples, and 12 \+ 12 .* the terms of this call alone"),
    "wrong rows": (WrongRows(), {}, r"gathers the rows of all samples.*use gather\.rows\(output\)"),
    "no rows": (NoRow(), {}, r"a tensor of shape \[\] for 12 samples; use one row a sample"),
    "undeclared": (Undeclared(), {}, r"or write loss\(self, output, batch, gather\)"),
    "another engine": (coupled.Pairs(), {"engine": "accelerate"}, r'engine "accelerate": the loss takes gather.*nat'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_coupled_loss_is_told_before_a_rank_starts(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task, run, words = WRONG[name]
    with pytest.raises(samestep.UserError) as caught:
        samestep.train(recipe_of(task), layout="dp2", **run)
    assert re.search(words, str(caught.value)), str(caught.value)


def test_messages_sent_seldom_are_refused_for_coupled_losses(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = samestep.Recipe(task=coupled.Pairs(), batch=8, steps=20, communication={"kind": "powersgd"})  # pyright: ignore
    with pytest.raises(samestep.UserError, match=r"the loss takes gather.*recipe.communication is powersgd"):
        samestep.train(recipe, layout="dp2")
