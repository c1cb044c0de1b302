"""Texts with labels as a source gives them, and cleaning that several sources share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Label = str | int


@dataclass(frozen=True, kw_only=True)
class LabelledTexts:
    """Texts and their labels, in the source's order."""

    origin: str  # what messages call the source
    texts: Sequence[str]
    labels: Sequence[Label]
    lines: Sequence[int] | None = None  # where each text starts in the file `origin`
    names: tuple[str, ...] | None = None  # the classes in their order, where the source fixes it

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Where a sample stands, for a message."""
        return f"{self.origin}:{self.lines[index]}" if self.lines else f"{self.origin}, sample {index + 1}"


def once_each(pairs: Iterable[tuple[str, str]], shortest: int = 1) -> dict[str, str]:
    """Each text once, with its label; without those that are too short or have two labels.

    A text that stood on both sides of a split would let a model score by remembering it.
    """
    labels: dict[str, set[str]] = {}
    for text, label in pairs:
        if len(text) >= shortest:
            labels.setdefault(text, set()).add(label)
    return {text: found.pop() for text, found in labels.items() if len(found) == 1}
