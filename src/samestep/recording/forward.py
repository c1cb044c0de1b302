"""Finds the first module whose output differs for the same samples with the same weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.recording.record import RankStep, Row

# Columns of a forward's rows beside its inputs: the number of each row's sample in its data set, and the samples that
# DataLoaders have given since the last forward, in whatever rows they are.
NUMBERED, GIVEN = "#", "#given"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Names of the inputs that identify a sample, in each run."""

    alone: Sequence[str]
    split: Sequence[str]


def rows_of_forward(forward: Mapping[str, Any], keys: Sequence[str]) -> list[Row]:
    """Return the samples of one forward, in order."""
    columns = [forward["rows"][name] for name in keys if name in forward["rows"]]
    return list(zip(*columns, strict=True)) if columns else []


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """A module whose output differs between two runs."""

    module: str  # its qualified name
    kind: str  # its class
    relative: float  # the largest difference of a row's numbers, relative to the row's norm
    in_parts: bool = False  # whether ranks have a part of each row


_LEAST = 1e-9  # of rounding, in float64; of other precisions a hundred times what gradients are held to


@dataclass(frozen=True, kw_only=True)
class ModulesCompared:
    """What all modules made of the samples that are in both runs."""

    first: ModuleDifference | None  # the first that differs, in order of completion
    some: bool  # whether there was any to compare


def first_module_apart(
    alone: Sequence[RankStep], split: Sequence[RankStep], keys: Keys, *, eps: float
) -> ModuleDifference | None:
    """Return the first differing module in order of completion; None if none differs, or no row is in both runs."""
    return compare_modules(alone, split, keys, eps=eps).first


def compare_modules(
    alone: Sequence[RankStep], split: Sequence[RankStep], keys: Keys, *, eps: float
) -> ModulesCompared:
    """Compare what modules made of each sample, up to the first module that differs."""
    outputs = _outputs(alone, keys.alone)
    theirs = _outputs(split, keys.split)
    limit = max(_LEAST, 100 * eps)
    some = False
    for place, rows in outputs.items():
        others = theirs.get(place, {})
        pairs = [(own[0], others[row]) for row, own in rows.items() if row in others]
        sizes = [size for own, parts in pairs if (size := _distance(own, parts)) is not None]
        sizes += _of_parts(pairs)
        some = some or bool(sizes)
        if sizes and not max(sizes) <= limit:
            own = next(output for row, output in rows.items() if row in others)[0]
            in_parts = any(row[0].numbers != own.numbers for row in others.values())
            first = ModuleDifference(module=place[0], kind=own.kind, relative=max(sizes), in_parts=in_parts)
            return ModulesCompared(first=first, some=True)
    return ModulesCompared(first=None, some=some)


@dataclass(frozen=True, kw_only=True)
class _Output:
    """Of one sample: the fingerprint of a module's output."""

    kind: str
    numbers: int
    norm: float
    product: float


def _distance(own: _Output, parts: Sequence[_Output]) -> float | None:
    """How far the output is apart, relative to its norm; None where ranks have other parts of it."""
    norm = max(own.norm, 1e-12)
    if parts[0].numbers == own.numbers:
        return max(abs(parts[0].norm - own.norm), abs(parts[0].product - own.product)) / norm
    return None


def _of_parts(pairs: Sequence[tuple[_Output, Sequence[_Output]]]) -> list[float]:
    """How far norms are apart where ranks have a part of each output, over all rows: rows may be places."""
    cut = [(own, parts) for own, parts in pairs if own.numbers not in {part.numbers for part in parts}]
    if not cut or any(sum(part.numbers for part in parts) != own.numbers for own, parts in cut):
        return []
    whole = math.hypot(*(own.norm for own, _ in cut))
    return [abs(math.hypot(*(part.norm for _, parts in cut for part in parts)) - whole) / max(whole, 1e-12)]


def _outputs(steps: Sequence[RankStep], keys: Sequence[str]) -> dict[tuple[str, int], dict[Row, list[_Output]]]:
    """Collect each sample's outputs, one of each rank, by module name and number of its call in a forward."""
    outputs: dict[tuple[str, int], dict[Row, list[_Output]]] = {}
    for step in steps:
        for place, rows in _outputs_of_rank(step, keys).items():
            made = outputs.setdefault(place, {})
            for row, output in rows.items():
                made.setdefault(row, []).append(output)
    return outputs


def _outputs_of_rank(step: RankStep, keys: Sequence[str]) -> dict[tuple[str, int], dict[Row, _Output]]:
    outputs: dict[tuple[str, int], dict[Row, _Output]] = {}
    for forward in step.forwards:
        rows = rows_of_forward(forward, keys)
        if len(rows) != forward.get("batch", len(rows)):  # samples that are in no known rows
            continue
        for place, call in _calls(forward):
            made = outputs.setdefault(place, {})
            for row, norm, product in zip(rows, call["norms"], call["products"], strict=False):
                output = _Output(kind=call["kind"], numbers=call["numbers"], norm=norm, product=product)
                made.setdefault(row, output)
    return outputs


def _calls(forward: Mapping[str, Any]) -> list[tuple[tuple[str, int], Mapping[str, Any]]]:
    """Return the recorded calls of a forward, each with its module and its number among that module's calls."""
    counted: dict[str, int] = {}
    calls = []
    for call in forward.get("activations", ()):
        number = counted.get(call["module"], 0)
        counted[call["module"]] = number + 1
        calls.append(((call["module"], number), call))
    return calls
