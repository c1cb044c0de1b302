"""Event simulation of a pipeline's step: each rank runs its actions in order, and each waits for its inputs.

A forward depends on the previous stage's forward of the same micro-batch, a backward on the next stage's backward and
on its own forward. Sends take time on the link, and the sender continues meanwhile.

Times are in seconds from the start of the step, which ends with the last action of the last rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from samestep.layout import Layout, Schedule

Kind = Literal["F", "B", "I", "W"]  # forward, backward, and backward's two halves: of inputs, of weights
_FEW_ROUNDS = 4  # micro-batches per rank that are simulated; further rounds are extrapolated
# Schedules that compute weight gradients separately.
SPLIT_BACKWARD: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv-zero-bubble")
_BACK_AGAIN = ("zbv-zero-bubble",)  # schedules whose second half of stages runs over the ranks in reverse


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch in one stage, and of sending its output to the next."""

    forward: float
    backward: float
    weights: float = 0.0  # the part of `backward` that computes weight gradients
    send: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One simulated action; `start` and `end` in seconds."""

    rank: int
    stage: int
    kind: Kind
    micro_batch: int
    start: float
    end: float


Order = Sequence[tuple[int, Kind, int]]  # stage, kind and micro-batch of each action of a rank


def owners(schedule: str, ranks: int, stages_a_rank: int) -> list[int]:
    """The pipeline rank of each stage."""
    line = list(range(ranks))
    return line + line[::-1] if schedule in _BACK_AGAIN else line * stages_a_rank


@lru_cache(maxsize=64)
def orders(schedule: str, *, ranks: int, stages_a_rank: int, micro_batches: int) -> tuple[Order, ...]:
    """The actions of every rank. Schedules that split the backward are PyTorch's, which is imported only for them."""
    if schedule == "gpipe":
        return tuple(_gpipe(rank, micro_batches) for rank in range(ranks))
    if schedule == "1f1b" or (schedule == "interleaved-1f1b" and stages_a_rank == 1):
        return tuple(_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks))
    if schedule == "interleaved-1f1b":
        return tuple(_interleaved(rank, ranks, stages_a_rank, micro_batches) for rank in range(ranks))
    from samestep.parallel.pipeline.schedule import orders_of

    made = orders_of(schedule, ranks=ranks, stages_a_rank=stages_a_rank, micro_batches=micro_batches)
    return tuple([(action.stage, action.kind, action.micro_batch) for action in rank] for rank in made)


def play(order: Sequence[Order], stages: Sequence[StageTimes], owner: Sequence[int]) -> list[Event]:
    """Simulate the actions of all ranks, with start and end in seconds."""
    return [
        Event(rank=rank, stage=stage, kind=kind, micro_batch=micro_batch, start=start, end=end)
        for rank, stage, kind, micro_batch, start, end in _played(order, stages, owner)
    ]


def _played(
    order: Sequence[Order], stages: Sequence[StageTimes], owner: Sequence[int]
) -> list[tuple[int, int, Kind, int, float, float]]:
    """Simulate all actions: rank, stage, kind, micro-batch, start and end of each.

    A rank advances until an action lacks an input, and is queued again when another rank produces one. Raises
    RuntimeError for a deadlock.
    """
    last = len(stages) - 1
    seconds = {kind: [_seconds(kind, times) for times in stages] for kind in ("F", "B", "I", "W")}
    # Seconds to send a micro-batch to the next stage, and its gradient to the previous one.
    onward = [
        0.0 if stage == last or owner[stage] == owner[stage + 1] else stages[stage].send for stage in range(last + 1)
    ]
    back = [
        0.0 if stage == 0 or owner[stage] == owner[stage - 1] else stages[stage].send for stage in range(last + 1)
    ]
    forwards: list[dict[int, float]] = [{} for _ in stages]  # end of each forward, by stage and micro-batch
    backwards: list[dict[int, float]] = [{} for _ in stages]
    free, at = [0.0] * len(order), [0] * len(order)
    events: list[tuple[int, int, Kind, int, float, float]] = []
    waiting = list(range(len(order)))
    while waiting:
        rank, advanced = waiting.pop(), False
        actions, now = order[rank], free[rank]
        woken: set[int] = set()
        while at[rank] < len(actions):
            stage, kind, micro_batch = actions[at[rank]]
            if kind == "F":
                ready = 0.0 if stage == 0 else forwards[stage - 1].get(micro_batch)
                lag = onward[stage - 1] if stage else 0.0
            elif kind == "W" or stage == last:
                ready, lag = (backwards if kind == "W" else forwards)[stage].get(micro_batch), 0.0
            else:
                ready, lag = backwards[stage + 1].get(micro_batch), back[stage + 1]
            if ready is None:
                break
            start = max(now, ready + lag)
            now = start + seconds[kind][stage]
            events.append((rank, stage, kind, micro_batch, start, now))
            if kind == "F":
                forwards[stage][micro_batch] = now
                woken.add(owner[min(stage + 1, last)])
            elif kind != "W":
                backwards[stage][micro_batch] = now
                woken.add(owner[max(stage - 1, 0)])
            at[rank] += 1
            advanced = True
        free[rank] = now
        waiting += [
            other for other in woken if other != rank and other not in waiting and at[other] < len(order[other])
        ]
        if not waiting and not advanced:
            break
    stuck = [order[rank][at[rank]] for rank in range(len(order)) if at[rank] < len(order[rank])]
    if stuck:
        raise RuntimeError(f"pipeline order waits for itself at {stuck}")
    return events


def elapsed(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> float:
    """Seconds from the start of the step to the end of its last action.

    With many micro-batches, two numbers of rounds are simulated and the rest is extrapolated linearly.
    """
    if layout.pipeline == 1:
        return micro_batches * sum(stage.forward + stage.backward for stage in stages)
    ranks = layout.pipeline
    if micro_batches % ranks and layout.schedule not in ("gpipe", "1f1b"):
        # Interleaved schedules need a multiple of `ranks`: interpolate between the multiples below and above.
        below = max(micro_batches // ranks * ranks, ranks)
        ends = [elapsed(layout, stages, number) for number in (below, below + ranks)]
        return ends[0] + (ends[1] - ends[0]) * (micro_batches - below) / ranks
    if micro_batches <= _FEW_ROUNDS * ranks:
        return _end(layout, stages, micro_batches)
    fewer = (_FEW_ROUNDS - 2) * ranks + micro_batches % ranks
    ends = [_end(layout, stages, fewer + ranks * more) for more in (0, 1)]
    return ends[1] + (ends[1] - ends[0]) * ((micro_batches - fewer) / ranks - 1)


def _end(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> float:
    return max(action[-1] for action in _played(*_order(layout, micro_batches, stages)))


def timeline(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> list[Event]:
    """Simulate a step under a layout's schedule."""
    return play(*_order(layout, micro_batches, stages))


def _order(
    layout: Layout, micro_batches: int, stages: Sequence[StageTimes]
) -> tuple[Sequence[Order], Sequence[StageTimes], Sequence[int]]:
    """The actions of every rank, the times of every stage, and the rank of each stage."""
    made = orders(
        layout.schedule,
        ranks=layout.pipeline,
        stages_a_rank=layout.stages_a_rank,
        micro_batches=micro_batches,
    )
    return made, stages, owners(layout.schedule, layout.pipeline, layout.stages_a_rank)


def _seconds(kind: Kind, times: StageTimes) -> float:
    """Seconds of an action; I takes the part of the backward that W does not."""
    if kind == "F":
        return times.forward
    if kind == "B":
        return times.backward
    return times.weights if kind == "W" else times.backward - times.weights


def _gpipe(rank: int, micro_batches: int) -> Order:
    """Every forward, then every backward (Huang et al., arXiv 1811.06965)."""
    forwards: list[tuple[int, Kind, int]] = [(rank, "F", number) for number in range(micro_batches)]
    return [*forwards, *((rank, "B", number) for number in range(micro_batches))]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Order:
    """1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1)."""
    ahead = min(ranks - 1 - rank, micro_batches)
    order: list[tuple[int, Kind, int]] = [(rank, "F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            order.append((rank, "F", ahead + number))
        order.append((rank, "B", number))
    return order


def _interleaved(rank: int, ranks: int, stages_a_rank: int, micro_batches: int) -> Order:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2.2): `ranks` micro-batches through each stage in turn."""
    total = micro_batches * stages_a_rank
    ahead = min((ranks - rank - 1) * 2 + (stages_a_rank - 1) * ranks, total)

    def action(kind: Kind, number: int) -> tuple[int, Kind, int]:
        """The number-th forward or backward of this rank (Narayanan et al. 2021, section 2.2.2).

        In a round, each chunk runs `ranks` micro-batches, from the first chunk in forward, from the last in backward.
        """
        in_round = number % (ranks * stages_a_rank)
        chunk = in_round // ranks
        if kind == "B":
            chunk = stages_a_rank - 1 - chunk
        micro_batch = number // (ranks * stages_a_rank) * ranks + in_round % ranks
        return chunk * ranks + rank, kind, micro_batch

    order = [action("F", number) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            order.append(action("F", ahead + number))
        order.append(action("B", number))
    return order
