"""What records of scripts say: averages, ends, groups, losses of own rows, states; and with their causes removed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import script_records as records
import torch
import zoo_tables
from script_records import Record, Step
from torch import Tensor

from samestep.errors import UserError
from samestep.script_proof.compare import Verdict, compare_runs
from samestep.script_proof.kinds import KINDS

pytestmark = pytest.mark.quick
WEIGHTS, GRADIENTS, MOVED = records.weights(0), records.weights(1), records.weights(2)
ROWS = ("abcd", "efgh", "ijkl")


def step(rows: str, **changed: Any) -> Step:
    return replace(Step(rows=[*rows], gradients=GRADIENTS, after=MOVED), **changed)


def record(*steps: Step, **changed: Any) -> Record:
    return Record(steps=steps, before=WEIGHTS, **changed)


def alone(count: int = 2, **changed: Any) -> Record:
    return record(*(step(rows, **changed) for rows in ROWS[:count]))


def halves(count: int = 2, **changed: Any) -> list[Record]:
    return [record(*(step(rows[rank::2], **changed) for rows in ROWS[:count])) for rank in range(2)]


def plus(values: Mapping[str, Tensor], amount: float) -> dict[str, Tensor]:
    return {name: value + amount for name, value in values.items()}


def verdict(folder: Path, one: Record, *split: Record) -> Verdict:
    return compare_runs(records.runs(folder, alone=one, split=split))


def kind_of(found: Verdict) -> str | None:
    return found.finding.kind if found.finding is not None else None


def averaged(count: int, *, moved: float = 0.0, when: int = 1) -> list[Record]:
    """Ranks that step by gradients of their own and average their weights after each `when` steps."""
    ranks = []
    for sign in (1, -1):
        steps = [
            step(
                ROWS[number][sign < 0 :: 2],
                gradients=plus(GRADIENTS, 0.5 * sign),
                after=plus(plus(MOVED, moved), 0.1 * sign),
                before=plus(MOVED, moved) if number and number % when == 0 else {},
            )
            for number in range(count)
        ]
        ranks.append(record(*steps))
    return ranks


@pytest.mark.parametrize(
    ("count", "moved", "when", "kind"),
    [(3, 0.0, 1, None), (3, 0.2, 1, "weights-averaged"), (3, 0.0, 2, "local-steps"), (3, 0.0, 9, "not-reduced")],
)
def test_averaged_weights_are_the_step_where_they_are_those_of_one_process(
    count: int, moved: float, when: int, kind: str | None, tmp_path: Path
) -> None:
    found = verdict(tmp_path, alone(count), *averaged(count, moved=moved, when=when))
    assert kind_of(found) == kind
    if kind == "local-steps":
        assert found.finding is not None
        assert found.finding.facts["count"] == 2


def test_a_run_that_ends_in_the_middle_ends_early_and_one_whose_samples_ran_out_loses_them(tmp_path: Path) -> None:
    assert kind_of(verdict(tmp_path / "early", alone(3), *halves(2))) == "ends-early"
    assert verdict(tmp_path / "as-long", alone(3), *halves(3)).same_step
    tail = record(*(step(rows) for rows in ("abcd", "efgh", "i")))
    assert kind_of(verdict(tmp_path / "tail", tail, *halves(2))) == "lost-samples"


@pytest.mark.parametrize(("rate", "kind"), [(0.01, None), (0.1, "other-group"), (0.05, "learning-rate-scaled")])
def test_a_rate_that_others_have_is_that_of_another_group(rate: float, kind: str | None, tmp_path: Path) -> None:
    one = alone(rates={"head.bias": 0.01})
    assert kind_of(verdict(tmp_path, one, *halves(rates={"head.bias": rate}))) == kind


@pytest.mark.parametrize(
    ("outputs", "losses", "kind"),
    [
        ((1.0, 1.0), ((1.0, 2),), "backward-differs"),
        ((1.0, 1.0), ((1.5, 2),), "loss-of-own-rows"),
        ((1.0, 1.0), ((1.5, 1),), "lost-targets"),
        ((1.0, 2.0), ((1.5, 2),), "forward-differs"),
        ((), ((1.5, 2),), "gradients-differ"),
    ],
)
def test_gradients_that_differ_are_told_by_modules_targets_and_losses(
    outputs: tuple[float, ...], losses: tuple[tuple[float, int], ...], kind: str, tmp_path: Path
) -> None:
    one = alone(outputs=(1.0, 1.0, 1.0, 1.0), losses=((1.0, 4),))
    gradients = {name: value + torch.arange(value.numel()).reshape(value.shape) for name, value in GRADIENTS.items()}
    split = halves(outputs=outputs, losses=losses, gradients=gradients)
    assert kind_of(verdict(tmp_path / "fault", one, *split)) == kind
    right = halves(outputs=(1.0, 1.0), losses=((1.0, 2),))
    assert verdict(tmp_path / "right", one, *right).same_step


def test_batches_that_are_padded_unlike_far_are_said_where_a_module_depends_on_it(tmp_path: Path) -> None:
    gradients = plus(GRADIENTS, 1.0)
    one = alone(outputs=(1.0,) * 4, shape=(12,))
    far = halves(outputs=(1.0, 2.0), shape=(9,), gradients=gradients)
    found = verdict(tmp_path / "fault", one, *far)
    assert kind_of(found) == "padding-matters"
    assert found.finding is not None
    assert found.finding.facts == {"alone": "12", "split": "9"}
    alike = halves(outputs=(1.0, 2.0), shape=(12,), gradients=gradients)
    assert kind_of(verdict(tmp_path / "alike", one, *alike)) == "forward-differs"
    assert verdict(tmp_path / "right", one, *halves(outputs=(1.0, 1.0), shape=(9,))).same_step


def test_a_state_that_differs_explains_gradients_and_is_no_finding_by_itself(tmp_path: Path) -> None:
    queue, other = torch.ones(4), torch.zeros(4)
    one = alone(state={"Queue.keys": queue})
    apart = [
        record(step("ac", state={"Queue.keys": keys}), step("eg", gradients=plus(GRADIENTS, 1.0)))
        for keys in (queue, other)
    ]
    apart[1].steps[0].rows, apart[1].steps[1].rows = [*"bd"], [*"fh"]
    found = verdict(tmp_path / "fault", one, *apart)
    assert kind_of(found) == "buffers-differ"
    assert found.finding is not None
    assert (found.finding.step, found.finding.module) == (1, "Queue.keys")
    unused = halves(state={"Queue.keys": queue})
    unused[1].steps[0].state = {"Queue.keys": other}
    assert verdict(tmp_path / "unused", one, *unused).same_step


def test_a_rank_without_an_optimizer_takes_the_steps_of_the_one_that_has_it(tmp_path: Path) -> None:
    one = alone(outputs=(1.0,) * 4)
    stepping, waiting = halves(outputs=(1.0, 1.0))
    waiting.idle = True
    assert verdict(tmp_path / "right", one, stepping, waiting).same_step
    stale = halves(outputs=(1.0, 1.0))[1]
    stale.idle = True
    stale.steps[1].outputs = (3.0, 3.0)
    stepping.steps[1].gradients = plus(GRADIENTS, 1.0)
    assert kind_of(verdict(tmp_path / "fault", one, stepping, stale)) == "weights-not-sent"


def test_flat_shards_that_are_filled_up_are_joined_without_what_fills_them(tmp_path: Path) -> None:
    whole = torch.arange(1.0, 8.0)
    parts = [torch.arange(1.0, 5.0), torch.tensor([5.0, 6.0, 7.0, 0.0])]

    def flat(value: Tensor, rows: str) -> Record:
        steps = [Step(rows=[*rows], gradients={"flat": value}, after={"flat": value})]
        return Record(steps=steps, before={"flat": value})

    assert verdict(tmp_path / "right", flat(whole, "abcd"), flat(parts[0], "ac"), flat(parts[1], "bd")).same_step
    wrong = flat(parts[1] * 2, "bd")
    assert not verdict(tmp_path / "fault", flat(whole, "abcd"), flat(parts[0], "ac"), wrong).same_step


def test_weights_of_another_type_and_weights_without_values_are_told(tmp_path: Path) -> None:
    few = halves()
    for each in few:
        each.before = {name: value.to(torch.bfloat16) for name, value in WEIGHTS.items()}
    assert kind_of(verdict(tmp_path / "type", alone(), *few)) == "other-dtype"
    empty = halves()
    for each in empty:
        each.before, each.emptied = {**WEIGHTS, "head.bias": torch.full((5,), torch.nan)}, True
    found = verdict(tmp_path / "empty", alone(), *empty)
    assert kind_of(found) == "not-initialised"
    assert found.finding is not None
    assert found.finding.module == "head.bias"
    filled = halves()
    for each in filled:
        each.emptied = True
    assert verdict(tmp_path / "filled", alone(), *filled).same_step


def test_a_step_without_a_gradient_is_told_by_who_has_none(tmp_path: Path) -> None:
    nothing = {name: torch.zeros_like(value) for name, value in GRADIENTS.items()}
    assert kind_of(verdict(tmp_path / "alone", alone(gradients=nothing), *halves())) == "zero-alone"
    assert kind_of(verdict(tmp_path / "split", alone(), *halves(gradients=nothing))) == "zero-split"


def test_further_parameters_explain_gradients(tmp_path: Path) -> None:
    more = {**GRADIENTS, "head.weight": torch.ones(2)}
    gradients = {**more, "body.weight": more["body.weight"] + torch.rand(4, 3)}
    split = halves(gradients=gradients, after={**MOVED, "head.weight": torch.ones(2)})
    found = verdict(tmp_path, alone(), *split)
    assert kind_of(found) == "further-parameters"
    assert found.finding is not None
    assert found.finding.facts["names"] == "head.weight"


def test_copies_that_no_optimizer_holds_are_compared(tmp_path: Path) -> None:
    copy = {f"Average/{name}": value for name, value in WEIGHTS.items()}
    other = plus(copy, 0.1)
    assert verdict(tmp_path / "right", alone(held=copy), *halves(held=copy)).same_step
    assert kind_of(verdict(tmp_path / "alone", alone(held=copy), *halves(held=other))) == "copy-differs"
    apart = halves(held=copy)
    for each in apart[1].steps:
        each.held = other
    assert kind_of(verdict(tmp_path / "ranks", alone(held=copy), *apart)) == "copies-differ"


def test_an_optimizer_whose_state_not_all_ranks_have_loaded_is_told_by_them(tmp_path: Path) -> None:
    one, split = alone(2), halves(2)
    split[1] = replace(split[1], steps=[split[1].steps[0], replace(split[1].steps[1], after=plus(MOVED, 0.1))])
    assert kind_of(verdict(tmp_path / "ranks", one, *split)) == "ranks-differ"
    for each in (one, split[0]):
        each.loaded = 1
    found = verdict(tmp_path / "loaded", one, *split)
    assert kind_of(found) == "optimizer-state-differs"
    assert found.finding is not None
    assert found.finding.facts["ranks"] == "1"
    split[1].loaded = 1
    assert kind_of(verdict(tmp_path / "all", one, *split)) == "ranks-differ"
    assert verdict(tmp_path / "right", one, *halves(2)).same_step


def test_rates_that_are_hardly_apart_are_shown_with_the_digits_that_differ_and_what_that_means(
    tmp_path: Path,
) -> None:
    def at(rate: float, *ranks: Record) -> list[Record]:
        return [replace(each, steps=[each.steps[0], replace(each.steps[1], lr=rate)]) for each in ranks]

    near = verdict(tmp_path / "near", *at(0.003, alone(2)), *at(0.0030000126, *halves(2)))
    assert near.finding is not None
    assert "the learning rate is 0.00300001 instead of 0.003" in near.finding.line
    assert any("4e-06 of one apart in step 2" in note.en for note in near.notes)
    far = verdict(tmp_path / "far", *at(0.003, alone(2)), *at(0.004, *halves(2)))
    assert far.finding is not None
    assert "the learning rate is 0.004 instead of 0.003" in far.finding.line
    assert not any("of one apart" in note.en for note in far.notes)


def test_a_rate_ends_where_it_is_0_and_not_where_another_optimizer_goes_on(tmp_path: Path) -> None:
    def told(found: Verdict) -> bool:
        return any("learning rate is 0" in note.en for note in found.notes)

    def runs_of(*rates: float) -> tuple[Record, list[Record]]:
        one, ranks = alone(3), halves(3)
        for each in (one, *ranks):
            for at, rate in zip(each.steps, rates, strict=True):
                at.lr = rate
        return one, ranks

    ended, whole = runs_of(0.1, 0.0, 0.0), runs_of(0.1, 0.1, 0.1)
    assert told(verdict(tmp_path / "ended", ended[0], *ended[1]))
    assert not told(verdict(tmp_path / "whole", whole[0], *whole[1]))
    one, ranks = runs_of(0.1, 0.1, 0.1)
    for each in (one, *ranks):
        for at in each.steps[1:]:
            at.gradients = {f"again.{name}": value for name, value in GRADIENTS.items()}
            at.after = {f"again.{name}": value for name, value in MOVED.items()}
    assert not told(verdict(tmp_path / "anew", one, *ranks))


def test_numbers_of_an_evaluation_are_joined_as_one_process_has_them(tmp_path: Path) -> None:
    def evaluated(each: Record, rows: str, *numbers: float) -> Record:
        return replace(each, evaluated=[*rows], reduced=numbers)

    one = evaluated(alone(), "xyz", 6.0)
    ranks = halves()
    right = [evaluated(ranks[0], "xy", 4.0), evaluated(ranks[1], "z", 2.0)]
    assert verdict(tmp_path / "right", one, *right).same_step
    means = [evaluated(ranks[0], "xy", 2.0), evaluated(ranks[1], "z", 1.0)]
    assert kind_of(verdict(tmp_path / "means", one, *means)) == "evaluation-joined"
    # exp of each rank's mean, averaged: a thousandth away
    exps = [evaluated(ranks[0], "xy", 6.1), evaluated(ranks[1], "z", 5.901)]
    assert kind_of(verdict(tmp_path / "exps", one, *exps)) == "evaluation-joined"
    moved = evaluated(alone(), "xyz", 6.001)
    assert compare_runs(records.runs(tmp_path / "noise", alone=one, split=exps, again=moved)).same_step
    own = [evaluated(ranks[0], "xy"), evaluated(ranks[1], "z")]
    assert kind_of(verdict(tmp_path / "own", evaluated(alone(), "xyz"), *own)) == "evaluation-own-share"


def crops(*, loss: float = 1.0, times: float = 1.0, odd: float = 1.0, second: str = "st") -> list[Record]:
    """Ranks that draw their own samples and step by `times` the mean of their own gradients."""
    reduced = {name: times * value for name, value in GRADIENTS.items()}
    reduced["head.bias"] = odd * reduced["head.bias"]
    ranks = []
    for first, later, sign in (("qr", "uv", 1), (second, "wx", -1)):
        known = {"gradients": reduced, "own": plus(GRADIENTS, 0.5 * sign), "losses": ((loss, 0),)}
        ranks.append(record(step(first, **known), step(later, **known), batches=0))
    return ranks


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, None),
        ({"loss": 1.1}, None),
        ({"loss": 0.5, "times": 2.0}, None),
        ({"times": 2.0}, "summed"),
        ({"loss": 2.0}, "summed"),
        ({"loss": 0.5}, "divided-twice"),
        ({"times": 1.5}, "reduced-otherwise"),
        ({"odd": 2.0}, "reduced-otherwise"),
    ],
)
def test_samples_that_each_rank_draws_are_judged_by_its_own_gradients(
    given: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    one = record(step("abcd"), step("efgh"), batches=0)
    found = verdict(tmp_path, one, *crops(**given))
    assert kind_of(found) == kind
    assert found.not_compared[0].en.startswith("samples" if kind is None else "an evaluation")


def test_samples_that_come_twice_or_from_a_loader_are_not_taken_for_draws(tmp_path: Path) -> None:
    one = record(step("abcd"), step("efgh"), batches=0)
    with pytest.raises(UserError, match="trains on other samples"):
        verdict(tmp_path / "loader", replace(one, batches=2), *crops())
    with pytest.raises(UserError, match="trains on other samples"):
        verdict(tmp_path / "twice", one, *crops(second="us"))


def test_every_kind_stands_in_one_group_of_the_zoos_table() -> None:
    grouped = [kind for _, kinds in zoo_tables.GROUPS for kind in kinds]
    assert sorted(grouped) == sorted(KINDS)
