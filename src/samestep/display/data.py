"""How a job reads its data, in the terminal and as JSON: facts, lengths, and samples with what of them counts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from samestep.display.tables import plain_console
from samestep.tasks.reading import Piece, Reading

_COUNTS, _OTHER = "counts", "      "  # before a piece's text


def print_reading(reading: Reading, chosen: Sequence[int]) -> None:
    """Print the facts, the lengths' distribution, and samples: a line for each run of tokens that counts, or not."""
    console = plain_console(highlight=False)
    for name, value in reading.facts.items():
        console.print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}", soft_wrap=True)
    spread = ", ".join(f"{name} {value:,}" for name, value in lengths_of(reading).items())
    console.print(f"tokens of a row: {spread}", soft_wrap=True)
    for number in chosen:
        pieces = reading.pieces(number)
        total, count = (sum(len(piece.tokens) for piece in part) for part in (pieces, _counting(pieces)))
        console.print(
            f"\nsample {number} ({reading.place(number)}): {total:,} tokens, {count:,} count", soft_wrap=True
        )
        for order, piece in enumerate(pieces):
            if piece.begins and order:
                console.print("       --")
            console.print(_line(piece), soft_wrap=True)


def _line(piece: Piece) -> Text:
    shown = piece.text.replace("\n", "\\n")
    if piece.counts:
        return Text.assemble((f"{_COUNTS} ", "bold green"), (shown, "green"))
    return Text(f"{_OTHER} {shown}", style="dim")


def _counting(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.counts]


def lengths_of(reading: Reading) -> Mapping[str, int]:
    """The least, the median, the 95th percentile and the most."""
    ordered = sorted(reading.lengths)
    if not ordered:
        return {}
    at = {"least": 0.0, "median": 0.5, "95 %": 0.95, "most": 1.0}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in at.items()}


def reading_json(reading: Reading, chosen: Sequence[int]) -> dict[str, Any]:
    """The same as values: each piece with its text, its tokens and whether they count."""
    samples = [
        {
            "sample": number,
            "place": reading.place(number),
            "pieces": [
                {"text": each.text, "tokens": list(each.tokens), "counts": each.counts, "begins": each.begins}
                for each in reading.pieces(number)
            ],
        }
        for number in chosen
    ]
    return {"facts": dict(reading.facts), "lengths": lengths_of(reading), "samples": samples}
