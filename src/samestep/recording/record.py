"""Records of a run: the steps of all its ranks, and tensors assembled from the ranks' parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.recording.skipped import SKIPPED, without_skipped
from samestep.recording.store import events, load

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank, as its recorder wrote it."""

    folder: Path
    values: Mapping[str, Any]

    @property
    def forwards(self) -> Sequence[Mapping[str, Any]]:
        return self.values["forwards"]

    @property
    def skipped(self) -> Sequence[Mapping[str, Any]]:
        """Forwards since the last step that this one did not use."""
        return self.values.get(SKIPPED, ())

    @property
    def losses(self) -> Sequence[Mapping[str, Any]]:
        return self.values["losses"]

    @property
    def clips(self) -> Sequence[Mapping[str, Any]]:
        return self.values["clips"]

    @cached_property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """The optimizer group's settings of each parameter, by name."""
        return {name: group["options"] for group in self.values["groups"] for name in group["names"]}

    @cached_property
    def tensors(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """File positions of the tensors, by kind (before, gradient, after, buffer) and name."""
        return {kind: {place["name"]: place for place in places} for kind, places in self.values["tensors"].items()}


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Records of one rank."""

    steps: Sequence[RankStep]
    evaluations: Sequence[Mapping[str, Any]]
    gathered: Sequence[Mapping[str, Any]]
    loaded: Sequence[int]  # numbers of steps after which an optimizer's state was loaded
    end: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()  # that data sets made
    iterations: Sequence[Mapping[str, Any]] = ()  # over DataLoaders
    variant: str = "as-is"
    joined: Sequence[Mapping[str, Any]] = ()  # numbers that the script sends to other ranks after an evaluation
    redrawn: Sequence[Mapping[str, Any]] = ()  # draws that were replaced by the ranks'
    masked: bool = False  # whether numbers were dropped by masks that no draw shows
    exhausted: Sequence[int] = ()  # numbers of steps after which a DataLoader had no further batch to train on
    emptied: bool = False  # whether a module got memory without values
    opened: Sequence[Mapping[str, Any]] = ()  # forwards and losses, by backward, before any optimizer stepped

    @property
    def idle(self) -> bool:
        """Whether no optimizer has stepped here; the steps are then those of another rank."""
        return not any(step.values["tensors"] or step.values["groups"] for step in self.steps)

    @classmethod
    def read(cls, folder: Path) -> "RankRecord":
        """Read one rank's records."""
        recorded = list(events(folder))

        def of(kind: str) -> list[Mapping[str, Any]]:
            return [event for event in recorded if event["event"] == kind]

        return cls(
            steps=[RankStep(folder=folder, values=event) for event in without_skipped(of("step"))],
            evaluations=of("evaluation"),
            gathered=of("gathered"),
            loaded=[event["after"] for event in of("loaded") if event["after"]],
            end=next(iter(of("end")), {}),
            samples=of("sample"),
            iterations=of("iteration"),
            redrawn=of("redrawn"),
            masked=bool(of("masked")),
            exhausted=[event["after"] for event in of("exhausted")],
            emptied=bool(of("emptied")),
            opened=of("opened"),
            joined=of("reduced"),
            variant=next((event.get("variant", "as-is") for event in of("start")), "as-is"),
        )

    def then(self, other: "RankRecord") -> "RankRecord":
        """Append the records of a rank that resumed where this one ended."""
        before = len(self.steps)

        def later(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            return [{**event, "after": event["after"] + before} for event in events]

        return RankRecord(
            steps=[*self.steps, *other.steps],
            evaluations=[*self.evaluations, *later(other.evaluations)],
            gathered=[*self.gathered, *later(other.gathered)],
            loaded=[*self.loaded, before, *(after + before for after in other.loaded)],
            end=other.end,
            joined=[*self.joined, *later(other.joined)],
            samples=[*self.samples, *other.samples],
            iterations=[*self.iterations, *other.iterations],
            exhausted=[*self.exhausted, *(after + before for after in other.exhausted)],
            emptied=self.emptied or other.emptied,
        )

    def in_steps_of(self, stepping: "RankRecord") -> "RankRecord":
        """Of a rank without an optimizer: what it did in each step of the rank that has one."""
        opened = iter(self.opened)
        steps = []
        for one in stepping.steps:
            parts = [part for _, part in zip(one.losses, opened, strict=False)]
            forwards = [forward for part in parts for forward in part["forwards"]]
            counts = accumulate(len(part["forwards"]) for part in parts)
            losses = [{**part["loss"], "after": count} for part, count in zip(parts, counts, strict=True)]
            if not losses:
                break
            values = {**_NOTHING, "forwards": forwards, "losses": losses}
            steps.append(RankStep(folder=one.folder, values=values))
        return replace(self, steps=steps)


_NOTHING: Mapping[str, Any] = {
    "clips": [],
    "groups": [],
    "tensors": {},
    "dropout": False,
    "changed": [],
    "scale": None,
}


@dataclass(frozen=True, kw_only=True)
class JoinedTensor:
    """A tensor of one step, assembled over all ranks."""

    value: Tensor  # the whole tensor, in float64
    copies: Sequence[Tensor] = ()  # each rank's copy, if replicated
    pieces: Sequence[tuple[int, Mapping[str, Any], Tensor]] = ()  # rank, place and values of each part, if sharded
    absent: Sequence[int] = ()  # ranks without any of it


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Records of a run's ranks."""

    ranks: Sequence[RankRecord]
    names: Mapping[str, str] = field(default_factory=dict)  # requested name -> recorded name
    cuts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # recorded name -> what ranks have cut by hand:
    # the dimension, and its size in the whole
    averaged: frozenset[int] = frozenset()  # steps after which the script averages its ranks' weights

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """What all ranks left, in the order of their numbers."""
        places = sorted(folder.glob("rank-*/"), key=lambda place: int(place.name.removeprefix("rank-")))
        ranks = [RankRecord.read(place) for place in places]
        stepping = next((rank for rank in ranks if rank.steps), None)
        if stepping is None:
            return cls(ranks=ranks)
        return cls(ranks=[rank if rank.steps or not rank.opened else rank.in_steps_of(stepping) for rank in ranks])

    def then(self, other: "RunRecord") -> "RunRecord":
        return RunRecord(ranks=[rank.then(its) for rank, its in zip(self.ranks, other.ranks, strict=True)])

    @property
    def steps(self) -> int:
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def step(self, number: int) -> list[RankStep]:
        return [rank.steps[number] for rank in self.ranks]

    def tensor_names(self, number: int, kind: str) -> list[str]:
        """In the order of the first rank that has any."""
        names: dict[str, None] = {}
        for step in self.step(number):
            names |= dict.fromkeys(step.tensors.get(kind, ()))
        return list(names)

    def joined(self, number: int, kind: str, name: str) -> JoinedTensor | None:
        """Assemble a tensor; None if no rank has it."""
        name = self.names.get(name, name)
        places = [step.tensors.get(kind, {}).get(name) for step in self.step(number)]
        held = [(rank, place) for rank, place in enumerate(places) if place is not None]
        if not held:
            return None
        absent = [rank for rank, place in enumerate(places) if place is None and not self.ranks[rank].idle]
        loaded = [(rank, place, _real(load(self.ranks[rank].steps[number].folder, place))) for rank, place in held]
        if all(place["start"] is None and place["offset"] is None for _, place, _ in loaded):
            if name in self.cuts:
                return _joined_by_hand(loaded, self.cuts[name], absent)
            if number in self.averaged and kind in ("gradient", "after"):
                return JoinedTensor(value=torch.stack([value for _, _, value in loaded]).mean(dim=0), absent=absent)
            return JoinedTensor(value=loaded[0][2], copies=[value for _, _, value in loaded], absent=absent)
        if (partial := loaded[0][1].get("partial")) is not None:
            total = torch.stack([value for _, _, value in loaded]).sum(dim=0)
            return JoinedTensor(value=total / len(loaded) if partial == "avg" else total)
        whole = torch.zeros(loaded[0][1]["whole"], dtype=torch.float64)
        for _, place, value in loaded:
            piece_of(whole, place).copy_(value.reshape(piece_of(whole, place).shape))
        return JoinedTensor(value=whole, pieces=loaded, absent=absent)

    def dtype(self) -> torch.dtype:
        """Dtype of the gradients, which determines rounding."""
        for kind in ("gradient", "after"):
            for place in self.step(0)[0].tensors.get(kind, {}).values():
                return getattr(torch, place["dtype"])
        return torch.float32


def _joined_by_hand(
    loaded: Sequence[tuple[int, Mapping[str, Any], Tensor]], cut: tuple[int, int], absent: Sequence[int]
) -> JoinedTensor:
    """Join parts in the order of ranks, without what fills the last one up."""
    dim, size = cut
    pieces = []
    start = 0
    for rank, place, part in loaded:
        value = part.narrow(dim, 0, max(0, min(part.shape[dim], size - start)))
        offset = [start if at == dim else 0 for at in range(value.dim())]
        pieces.append((rank, {**place, "offset": offset, "shape": list(value.shape)}, value))
        start += value.shape[dim]
    return JoinedTensor(value=torch.cat([value for _, _, value in pieces], dim), pieces=pieces, absent=absent)


def piece_of(whole: Tensor, place: Mapping[str, Any]) -> Tensor:
    """Return the part of a tensor at a place, as a writable view."""
    if place["start"] is not None:
        count = place["shape"][0] if place["shape"] else 1
        return whole.view(-1)[place["start"] : place["start"] + count]
    if place["offset"] is not None:
        for dim, (start, count) in enumerate(zip(place["offset"], place["shape"], strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), count)
    return whole


def _real(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def with_names_of(run: RunRecord, other: RunRecord) -> RunRecord:
    """Return a run whose tensors are accessed by another run's names.

    A model that a framework wraps has other names: `net.0.weight` is `0.weight`. If no names match, tensors of the
    same shapes are matched in the optimizer's order. Tensors of which each rank has a part of its own, cut by the
    script itself, are joined.
    """
    renamed = _named_as(run, other)
    return replace(renamed, cuts=dict(_cuts(renamed, other)))


def _cuts(run: RunRecord, other: RunRecord) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the tensors that all ranks' parts together make up, with the dimension along which they do, and its size.

    Parts of one dimension may be filled up to equal lengths, as flat ones are.
    """
    if not run.steps or not other.steps or len(run.ranks) < 2:
        return
    for name in other.tensor_names(0, "after"):
        whole = next(filter(None, (step.tensors["after"].get(name) for step in other.step(0))))["whole"]
        split_name = run.names.get(name, name)
        places = [step.tensors.get("after", {}).get(split_name) for step in run.step(0)]
        shapes = [place["whole"] for place in places if place and place["start"] is None and place["offset"] is None]
        if len(shapes) < len(places) or any(len(shape) != len(whole) for shape in shapes):
            continue
        unlike = [dim for dim in range(len(whole)) if any(shape[dim] != whole[dim] for shape in shapes)]
        if len(unlike) != 1:
            continue
        sizes, size = [shape[unlike[0]] for shape in shapes], whole[unlike[0]]
        filled = len(whole) == 1 and len(set(sizes)) == 1 and 0 < sum(sizes) - size < len(sizes)
        if sum(sizes) == size or filled:
            yield split_name, (unlike[0], size)


def _named_as(run: RunRecord, other: RunRecord) -> RunRecord:
    """Return the run with the other's names."""
    own = dict.fromkeys(name for kind in ("gradient", "after") for name in run.tensor_names(0, kind))
    theirs = dict.fromkeys(name for kind in ("gradient", "after") for name in other.tensor_names(0, kind))
    if own.keys() == theirs.keys() or not own or not theirs:
        return run
    names = dict(_by_ending(list(theirs), list(own)))
    if not names and len(own) == len(theirs):
        names = dict(zip(theirs, own, strict=True))
    return replace(run, names=names)


def _by_ending(names: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names that are the same but for a prefix, such as "module."; without one that fits in two ways."""
    for name in names:
        same = [
            other for other in others if other == name or other.endswith(f".{name}") or name.endswith(f".{other}")
        ]
        if len(same) == 1 or (same and name in same):
            yield name, name if name in same else same[0]
