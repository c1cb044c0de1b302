"""Finds the first module whose output differs for the same samples with the same weights."""

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


_LEAST = 1e-9  # of rounding, in float64; of other precisions a hundred times what gradients are held to


def first_module_apart(
    alone: Sequence[RankStep], split: Sequence[RankStep], keys: Keys, *, eps: float
) -> ModuleDifference | None:
    """Return the first differing module in order of completion; None if none differs, or no row is in both runs."""
    mine = _outputs(alone, keys.alone)
    theirs = _outputs(split, keys.split)
    limit = max(_LEAST, 100 * eps)
    found: dict[tuple[str, int], ModuleDifference] = {}
    for place, rows in mine.items():
        worst = 0.0
        others = theirs.get(place)
        if others is None:
            continue
        for row, (kind, numbers, norm, product) in rows.items():
            other = others.get(row)
            if other is None or other[1] != numbers:
                continue
            apart = max(abs(other[2] - norm), abs(other[3] - product)) / max(norm, 1e-12)
            worst = max(worst, apart)
            if apart > limit:
                found[place] = ModuleDifference(module=place[0], kind=kind, relative=worst)
        if place in found:
            return found[place]
    return None


_Numbers = tuple[str, int, float, float]


def _outputs(steps: Sequence[RankStep], keys: Sequence[str]) -> dict[tuple[str, int], dict[Row, _Numbers]]:
    """Collect each sample's recorded output, by module name and number of the call within a forward."""
    found: dict[tuple[str, int], dict[Row, _Numbers]] = {}
    for step in steps:
        for forward in step.forwards:
            rows = rows_of_forward(forward, keys)
            if len(rows) != forward.get("batch", len(rows)):  # samples that are in no known rows
                continue
            for place, call in _calls(forward):
                made = found.setdefault(place, {})
                for row, norm, product in zip(rows, call["norms"], call["products"], strict=False):
                    made.setdefault(row, (call["kind"], call["numbers"], norm, product))
    return found


def _calls(forward: Mapping[str, Any]) -> list[tuple[tuple[str, int], Mapping[str, Any]]]:
    """Return the recorded calls of a forward, each with its module and its number among that module's calls."""
    counted: dict[str, int] = {}
    calls = []
    for call in forward.get("activations", ()):
        number = counted.get(call["module"], 0)
        counted[call["module"]] = number + 1
        calls.append(((call["module"], number), call))
    return calls
