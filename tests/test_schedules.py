"""Schedules of pipelines: orders that do everything once and idle as the papers say, and the best cuts."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.layout import Layout
from samestep.parallel.pipeline.partition import best_starts
from samestep.parallel.pipeline.schedule import SCHEDULES, micro_batches, orders_of, owners
from samestep.parallel.pipeline.timeline import bubble, bubble_formula, ideal_times

pytestmark = pytest.mark.quick


def cost_of(costs: Sequence[float], starts: Sequence[int]) -> float:
    ends = [*starts[1:], len(costs)]
    # Later stages cost less for the same blocks, as activations in flight do.
    return max(sum(costs[a:b]) * (1 + 1 / (1 + s)) for s, (a, b) in enumerate(zip(starts, ends, strict=True)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(costs: list[int], stages: int) -> None:
    assume(stages <= len(costs))
    found = best_starts(len(costs), stages, lambda s, a, b: sum(costs[a:b]) * (1 + 1 / (1 + s)))
    every = ([0, *rest] for rest in itertools.combinations(range(1, len(costs)), stages - 1))
    assert found[0] == 0
    assert cost_of(costs, found) == min(cost_of(costs, starts) for starts in every)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_schedule_does_everything_once_and_idles_as_its_paper_says(schedule: Any, ranks: int) -> None:
    layout = Layout(pipeline=ranks, schedule=schedule)
    for batch in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        count = micro_batches(layout, batch, micro_batch=1)
        assert count is not None
        assert count >= batch
        stages = layout.stages_a_rank
        orders = orders_of(schedule, ranks=ranks, stages_a_rank=stages, micro_batches=count)
        done = Counter((a.stage, a.kind, a.micro_batch) for actions in orders for a in actions)
        assert set(done.values()) == {1}
        for stage, number in itertools.product(range(ranks * stages), range(count)):
            assert (stage, "F", number) in done
            assert ((stage, "B", number) in done) != ({(stage, "I", number), (stage, "W", number)} <= done.keys())
        assert owners(layout) == [
            next(rank for rank, actions in enumerate(orders) if any(a.stage == stage for a in actions))
            for stage in range(ranks * stages)
        ]
        assert bubble(ideal_times(orders)) == pytest.approx(bubble_formula(layout, count))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_in_one_piece_is_in_one_stage_at_a_time(schedule: Any, ranks: int) -> None:
    layout = Layout(pipeline=ranks, schedule=schedule)
    assert micro_batches(layout, 12, None, undivided=True) == 1
    assert micro_batches(layout, 12, 2, undivided=True) == 6  # refused in the first step
    orders = orders_of(schedule, ranks=ranks, stages_a_rank=layout.stages_a_rank, micro_batches=1)
    done = Counter((a.stage, a.kind) for actions in orders for a in actions)
    assert done == Counter(itertools.product(range(layout.pipeline * layout.stages_a_rank), "FB"))
    for rank, actions in enumerate(orders):
        assert {owners(layout)[a.stage] for a in actions} == {rank}
    assert bubble(ideal_times(orders)) == pytest.approx(1 - 1 / ranks) == bubble_formula(layout, 1)


@pytest.mark.parametrize(
    ("layout", "batch", "micro_batch", "count"),
    [
        ("dp4", 64, None, None),
        ("pp2", 64, None, 4),
        ("pp2", 3, None, 3),
        ("pp4", 2, None, 4),
        ("pp2 dp2", 33, 3, 6),
        ("pp3 schedule=interleaved-1f1b", 64, 8, 9),
        ("pp2 schedule=zbv-zero-bubble", 15, 3, 5),
    ],
)
def test_how_many_micro_batches(layout: str, batch: int, micro_batch: int | None, count: int | None) -> None:
    assert micro_batches(Layout.parse(layout), batch, micro_batch) == count
