"""A pipeline's step played event by event: each rank runs its actions in order, and waits for what they need.

A forward needs the stage before it to have computed the same micro-batch, a backward the stage after it and its own
forward. What is sent takes time on the link; the sender goes on meanwhile.

Times are seconds of one rank's clock from the step's beginning; the step ends when the last rank has done its last
action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from samestep.layout import Layout, Schedule

Kind = Literal["F", "B", "I", "W"]  # forward, backward, and backward's two halves: of inputs, of weights
_FEW_ROUNDS = 4  # micro-batches a rank that are played; of more, the rounds between repeat
# Schedules that compute gradients of weights apart.
SPLIT_BACKWARD: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv-zero-bubble")
_BACK_AGAIN = ("zbv-zero-bubble",)  # schedules whose second half of stages goes back over the ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch in one stage, and of sending what it makes to the next."""

    forward: float
    backward: float
    weights: float = 0.0  # the part of the backward that computes gradients of weights
    send: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action as it was played."""

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
    """The actions of every rank. Schedules that split their backward are PyTorch's, which is loaded for them."""
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
    """Every action with its start and end, in seconds from the first one."""
    return [
        Event(rank=rank, stage=stage, kind=kind, micro_batch=micro_batch, start=start, end=end)
        for rank, stage, kind, micro_batch, start, end in _played(order, stages, owner)
    ]


def _played(
    order: Sequence[Order], stages: Sequence[StageTimes], owner: Sequence[int]
) -> list[tuple[int, int, Kind, int, float, float]]:
    """Rank, stage, kind, micro-batch, start and end of every action.

    Each rank goes on until it waits for a rank that has not come so far. That one wakes it when it has.
    """
    last = len(stages) - 1
    seconds = {kind: [_seconds(kind, times) for times in stages] for kind in ("F", "B", "I", "W")}
    # What it takes to hand a micro-batch on to the next stage, and its gradient to the one before.
    onward = [
        0.0 if stage == last or owner[stage] == owner[stage + 1] else stages[stage].send for stage in range(last + 1)
    ]
    back = [
        0.0 if stage == 0 or owner[stage] == owner[stage - 1] else stages[stage].send for stage in range(last + 1)
    ]
    forwards: list[dict[int, float]] = [{} for _ in stages]  # by stage and micro-batch, when it was done
    backwards: list[dict[int, float]] = [{} for _ in stages]
    free, at = [0.0] * len(order), [0] * len(order)
    found: list[tuple[int, int, Kind, int, float, float]] = []
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
            found.append((rank, stage, kind, micro_batch, start, now))
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
    return found


def elapsed(layout: Layout, stages: Sequence[StageTimes], micro_batches: int) -> float:
    """Seconds until the last rank has done its last action.

    Of many micro-batches some rounds are played: those in between repeat, each as long as the one before.
    """
    if layout.pipeline == 1:
        return micro_batches * sum(stage.forward + stage.backward for stage in stages)
    ranks = layout.pipeline
    if micro_batches % ranks and layout.schedule not in ("gpipe", "1f1b"):
        # Schedules in rounds are made for whole ones: in proportion between the numbers below and above.
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
    """Every action of a step under a layout's schedule."""
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
    """How long an action takes: I is what of a backward is not W."""
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
    found: list[tuple[int, Kind, int]] = [(rank, "F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            found.append((rank, "F", ahead + number))
        found.append((rank, "B", number))
    return found


def _interleaved(rank: int, ranks: int, stages_a_rank: int, micro_batches: int) -> Order:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2.2): a micro-batch a rank through each of its stages in turn."""
    total = micro_batches * stages_a_rank
    ahead = min((ranks - rank - 1) * 2 + (stages_a_rank - 1) * ranks, total)

    def action(kind: Kind, number: int) -> tuple[int, Kind, int]:
        """The number-th forward or backward of this rank (Narayanan et al. 2021, section 2.2.2).

        In a round each chunk takes as many micro-batches as there are ranks, forwards from the first chunk on,
        backwards from the last.
        """
        in_round = number % (ranks * stages_a_rank)
        chunk = in_round // ranks
        if kind == "B":
            chunk = stages_a_rank - 1 - chunk
        micro_batch = number // (ranks * stages_a_rank) * ranks + in_round % ranks
        return chunk * ranks + rank, kind, micro_batch

    found = [action("F", number) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            found.append(action("F", ahead + number))
        found.append(action("B", number))
    return found
