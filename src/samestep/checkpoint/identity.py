"""What a training learns from, as its checkpoints say it: its data, and the user's code that makes a step of them.

At a resume other data are refused, unless the job accepts them, and other code is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Strict

from samestep.checkpoint.values import changed_values
from samestep.data.fingerprint import SamplesIdentity, compare, identify, is_comparable
from samestep.data.types import Samples

_Text = Annotated[str, Strict()]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What tells the data and the code of one training from another's."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    train: SamplesIdentity
    held_out: SamplesIdentity | None = None
    sources: Mapping[str, _Text] = field(default_factory=dict)  # a recipe's key -> hash of the files that it names
    code: Mapping[str, _Text] = field(default_factory=dict)  # file -> hash of its source
    values: Mapping[str, _Text] = field(default_factory=dict)  # that the task and the model hold

    def summary(self) -> dict[str, str]:
        """What it says, in short, by name."""
        rows = {"data": _described(self.train), "held-out data": _described(self.held_out)}
        return {**rows, "code": ", ".join(f"{name} {digest[:8]}" for name, digest in self.code.items())}


def _described(identity: SamplesIdentity | None) -> str:
    """A data set in short: how many samples, what of them was compared, and a hash."""
    if identity is None:
        return ""
    if identity.whole is not None:
        return f"{identity.samples:,} samples, all of them {identity.whole.exact[:8]}"
    parts = ", ".join(
        f"{part} {marks[-1].exact[:8]}" for part, marks in identity.parts.items() if marks and marks[-1]
    )
    left_out = ", ".join([*(f"{part} (random)" for part in identity.drawn), *identity.unknown])
    seen = f"{identity.samples:,} samples, of {identity.rows:,} {parts or 'nothing'}"
    return f"{seen}; not compared: {left_out}" if left_out else seen


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The identity of a training now, and how it differs from that of a checkpoint."""

    now: Identity
    data: tuple[str, ...] = ()  # differences of the data, a sentence each
    notes: tuple[str, ...] = ()  # what may be one
    code: tuple[str, ...] = ()  # the files whose code has changed
    values: tuple[str, ...] = ()  # differences of what the task and the model hold
    sources: frozenset[str] = frozenset()  # the recipe's keys that name files then and now
    same_sources: frozenset[str] = frozenset()  # those of the same contents or samples, at whatever path
    same_code: bool = False  # whatever its files are called


@dataclass(frozen=True, kw_only=True)
class LearnsFrom:
    """The data and the code of a training that runs."""

    train: Samples
    held_out: Callable[[], Samples | None] = lambda: None
    sources: Callable[[], Mapping[str, str]] = dict
    code: Callable[[], Mapping[str, str]] = dict
    values: Mapping[str, str] = field(default_factory=dict)

    def look(self, before: Identity | None) -> Compared:
        """Look at the data and the code, and compare them with those of a checkpoint, if it says any."""
        held_out, sources, code = self.held_out(), self.sources(), self.code()
        train, of_train = _looked(self.train, None if before is None else before.train)
        held, of_held = None, None
        if held_out is not None:
            held, of_held = _looked(held_out, None if before is None else before.held_out)
        now = Identity(train=train, held_out=held, sources=sources, code=code, values=self.values)
        if before is None:
            return Compared(now=now)
        sets = [
            ("the training set", train, before.train, of_train),
            ("the held-out set", held, before.held_out, of_held),
        ]
        data = [f"{name} {how}" for name, _, _, how in sets if how is not None]
        others = [key for key, digest in sources.items() if before.sources.get(key, digest) != digest]
        notes = [
            f"{name} is of another kind than it was (arrays, or single samples), so its contents can't be compared"
            for name, of_now, of_before, _ in sets
            if of_now is not None and of_before is not None and not is_comparable(of_before, of_now)
        ]
        is_whole = train.is_whole and (held is None or held.is_whole)
        for key in others:
            line = f"recipe.{key} has other contents"
            seen = "the samples" if is_whole else f"those of {train.samples:,} samples that are compared"
            if of_train or of_held:
                data.append(line)
            elif not key.startswith("data."):  # it may be another kind of file, such as one that the task writes
                notes.append(f"{line}, and {seen} are the same")
            elif not is_whole:
                data.append(f"{line}, though {seen} are the same")
        same = {key for key, digest in sources.items() if before.sources.get(key) == digest}
        if is_whole and not data:  # a file that was written otherwise, such as with other ends of lines
            same |= {key for key in others if key.startswith("data.")}
        return Compared(
            now=now,
            data=tuple(data),
            notes=tuple(notes),
            code=changed_code(before, code),
            values=changed_values(before.values, self.values),
            sources=frozenset(sources.keys() & before.sources.keys()),
            same_code=bool(code) and sorted(code.values()) == sorted(before.code.values()),
            same_sources=frozenset(same),
        )


def changed_code(before: Identity, code: Mapping[str, str]) -> tuple[str, ...]:
    """The files whose code isn't that of a checkpoint, among those that both know."""
    return tuple(name for name, digest in code.items() if before.code.get(name, digest) != digest)


def _looked(samples: Samples, before: SamplesIdentity | None) -> tuple[SamplesIdentity, str | None]:
    """A data set's identity, and how it differs from that of a checkpoint."""
    return (identify(samples), None) if before is None else compare(samples, before)
