"""From labels, which are names or integers, to class numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.data.texts import Label, LabelledTexts
from samestep.errors import UserError, closest


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes in their order, and who says so (for messages)."""

    names: tuple[str, ...]
    said_by: str

    def numbers(self, samples: LabelledTexts) -> list[int]:
        """The class of each sample. Raises UserError with the place of a label that is none of the classes."""
        by_label = self._by_label()
        try:
            return [by_label[label] for label in samples.labels]
        except KeyError:
            wrong = next(index for index, label in enumerate(samples.labels) if label not in by_label)
            raise UserError(self._unknown(samples.place(wrong), samples.labels[wrong])) from None

    def _by_label(self) -> dict[Label, int]:
        """A name is its class; an integer is the class of that number, unless the names are integers themselves."""
        by_name: dict[Label, int] = {name: number for number, name in enumerate(self.names)}
        if all(name.isdecimal() for name in self.names):
            return by_name | {int(name): number for number, name in enumerate(self.names)}
        return by_name | {number: number for number in range(len(self.names))}

    def _unknown(self, place: str, label: Label) -> str:
        if isinstance(label, str):
            return f'{place}: label "{label}" is not in {self.said_by}; {closest(label, self.names)}'
        return (
            f"{place}: label {label} is out of range; {self.said_by} has {len(self.names)} classes, "
            f"so 0 to {len(self.names) - 1} would do"
        )


def find_classes(samples: LabelledTexts, wanted: Sequence[str] | None, where: str) -> Classes:
    """The classes of a training file: `wanted`, which stands at the key `where`, or else what its labels say.

    Raises UserError where they are fewer than two, or where integers can't be classes.
    """
    distinct = set(samples.labels)
    if len(distinct) < 2:
        raise UserError(f"{samples.origin}: every label is {samples.labels[0]!r}; at least two classes are needed")
    if wanted is not None:
        return Classes(names=tuple(wanted), said_by=where)
    names = samples.names or _names(samples)
    return Classes(names=names, said_by=f"the labels of {samples.origin}")


def _names(samples: LabelledTexts) -> tuple[str, ...]:
    integers = [label for label in samples.labels if isinstance(label, int)]
    if not integers:
        return tuple(sorted({str(label) for label in samples.labels}))
    lowest, highest = min(integers), max(integers)
    if lowest < 0:
        place = samples.place(samples.labels.index(lowest))
        raise UserError(f"{place}: label {lowest} is below 0; integer labels are classes, counted from 0")
    if highest >= len(samples):
        place = samples.place(samples.labels.index(highest))
        raise UserError(
            f"{place}: label {highest} would make {highest + 1} classes for {len(samples)} samples; "
            f"integer labels are classes, counted from 0"
        )
    return tuple(str(number) for number in range(highest + 1))
