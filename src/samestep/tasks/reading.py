"""How a task reads its data: what `samestep data` shows, and what a training says of it at its start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of a sample that count in the loss, or don't."""

    text: str
    counts: bool
    tokens: Sequence[int]
    begins: bool = False  # whether a document of the sample begins here


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The samples of a task as it reads them."""

    facts: Mapping[str, str | int]  # such as the format of the rows, and how many were cut
    lengths: Sequence[int]  # tokens of each row
    samples: int
    pieces: Callable[[int], Sequence[Piece]]  # of a sample, by its number
    place: Callable[[int], str] = field(default=str)  # where a sample comes from

    @property
    def sentence(self) -> str:
        """The facts in a line."""
        parts = (
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in self.facts.items()
        )
        return ", ".join(parts)
