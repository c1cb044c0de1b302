"""Random numbers that a script draws while it trains: noted with their shapes, and given to the run alone, joined.

Noise and times of diffusion, of variational autoencoders, masks of dropout: each rank draws them for its own samples.
One process that is given the same batches gets what the ranks drew, in the order of the samples, so that it does the
same sums. A draw has a place: the steps and the backwards since, whether a backward runs, and how many of its kind
were made there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.recording.store import RecordWriter, events, load
from samestep.torch_internals.sharded import DTensor

_MOST_NUMBERS = 1 << 24  # of a draw
_MOST_BEFORE = 1 << 16  # of one before the training begins, where models are made

# How the run alone got its numbers.
JOINED, SAME, ONE, UNLIKE, UNKNOWN = "joined", "same", "one", "unlike", "unknown"

_Place = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Now:
    """Where a script is when it draws."""

    step: int
    backwards: int  # since the step
    in_backward: bool
    training: bool  # whether any batch or forward was seen


class Draws:
    """Notes the draws of a rank, or replaces those of a run alone by the ranks'."""

    def __init__(self, writer: RecordWriter, *, from_run: Path | None, together: int, notes: bool) -> None:
        """`from_run`: a split run. `together`: its micro-batches, of all ranks, in one of the run alone."""
        self._writer = writer
        self._notes = notes
        self._together = together
        self._counts: Counter[_Place] = Counter()
        self._ranks = [] if from_run is None else [_of_rank(folder) for folder in rank_folders(from_run)]
        self._folders = [] if from_run is None else rank_folders(from_run)

    def drawn(self, name: str, result: Any, now: Now) -> None:
        """A function has drawn `result`; it is overwritten where the run is given other draws."""
        if not isinstance(result, Tensor) or isinstance(result, DTensor) or result.is_meta:
            return
        if result.numel() > (_MOST_NUMBERS if now.training else _MOST_BEFORE):
            return
        at = (now.step, now.backwards, now.in_backward, name)
        number = self._counts[at]
        self._counts[at] += 1
        if self._ranks:
            self._replace((*at, number), result, now)
        elif self._notes:
            place = self._writer.tensor(result)
            self._writer.event("draw", place=[*at, number], training=now.training, tensor=place)

    def _replace(self, place: _Place, result: Tensor, now: Now) -> None:
        how, value, equal = self._given(place, result)
        if value is not None:
            with torch.no_grad():
                result.copy_(value)
        if now.training or how == JOINED:
            shape = list(result.shape)
            self._writer.event("redrawn", how=how, name=place[3], shape=shape, equal=equal, after=now.step)

    def _given(self, place: _Place, result: Tensor) -> tuple[str, Tensor | None, bool]:
        """How a draw is replaced, by what, and whether all ranks drew equal numbers."""
        values = self._values(place)
        if not values:
            return UNKNOWN, None, False
        equal = all(value.shape == values[0].shape and value.equal(values[0]) for value in values)
        if all(value.shape == result.shape for value in values):
            if equal:
                return (SAME if len(values) > 1 else ONE), values[0], equal
            return UNLIKE, None, False
        dim = _dim_of(values, result)
        return (UNLIKE, None, equal) if dim is None else (JOINED, torch.cat(values, dim), equal)

    def _values(self, place: _Place) -> list[Tensor]:
        """The draws of the ranks' micro-batches that are one of this run, in the order of their samples."""
        step, backwards, in_backward, name, number = place
        ranks = len(self._ranks)
        values = []
        for unit in range(backwards * self._together, (backwards + 1) * self._together):
            key = (step, unit // ranks, in_backward, name, number)
            recorded = self._ranks[unit % ranks].get(key)
            if recorded is None:
                return []
            values.append(load(self._folders[unit % ranks], recorded))
        return values


def _dim_of(values: Sequence[Tensor], result: Tensor) -> int | None:
    """The dimension in which the values make up a tensor of the result's shape."""
    if any(value.dim() != result.dim() for value in values):
        return None
    unlike = [dim for dim, size in enumerate(result.shape) if any(value.shape[dim] != size for value in values)]
    if len(unlike) != 1 or sum(value.shape[unlike[0]] for value in values) != result.shape[unlike[0]]:
        return None
    return unlike[0]


def rank_folders(run: Path) -> list[Path]:
    return sorted(run.glob("rank-*/"), key=lambda place: int(place.name.removeprefix("rank-")))


def _of_rank(folder: Path) -> Mapping[_Place, Mapping[str, Any]]:
    return {tuple(event["place"]): event["tensor"] for event in events(folder) if event["event"] == "draw"}


def own_draw(run: Path) -> str | None:
    """The function by which ranks first draw numbers, while they train, that are each rank's own."""
    ranks = [
        [event for event in events(folder) if event["event"] == "draw" and event["training"]]
        for folder in rank_folders(run)
    ]
    for places in zip(*ranks, strict=False):
        values = [load(folder, place["tensor"]) for folder, place in zip(rank_folders(run), places, strict=True)]
        if not all(value.shape == values[0].shape and value.equal(values[0]) for value in values):
            return str(places[0]["place"][3])
    return None


def draws(run: Path) -> bool:
    """Whether a run draws random numbers, beside those of its data sets, while it trains."""
    folders = rank_folders(run)
    return bool(folders) and any(event["event"] == "draw" and event["training"] for event in events(folders[0]))
