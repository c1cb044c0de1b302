"""Holdings in the terminal: a row a rank, and under it who talks to whom."""

from collections.abc import Callable
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from samestep.report.holdings import STATES, Groups, Holding, Holdings, Part


def print_holdings(shown: Holdings, console: Console | None = None) -> None:
    console = console or Console(markup=False, emoji=False)
    console.print(_ranks(shown))
    if shown.groups:
        console.print(_talks(shown))


def words(part: Part) -> str:
    """A part as people count, from 1."""
    return "all" if part.of == 1 else f"{part.index + 1} of {part.of}"


def sample_words(holding: Holding) -> str:
    """The samples of a rank: their places in the global batch, or its slice where the batch's size is not known."""
    if holding.positions is None:
        return words(holding.samples)
    start, stop = holding.positions
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"


def _ranks(shown: Holdings) -> Table:
    layout = shown.layout
    table = Table(title=f"{layout}: {layout.size} rank{'' if layout.size == 1 else 's'}")
    columns = _columns(shown)
    for name in columns:
        table.add_column(name, justify="right")
    for holding in shown.ranks:
        table.add_row(*(cell(holding) for cell in columns.values()))
    return table


def _columns(shown: Holdings) -> dict[str, Callable[[Holding], str]]:
    """Head and cells of each column; what the layout doesn't split is left out."""
    columns: dict[str, Callable[[Holding], str]] = {
        "pipeline\nstages": lambda holding: ", ".join(map(str, holding.stages)),
        "replicate": lambda holding: str(holding.coordinates["replicate"]),
        "shard": lambda holding: str(holding.coordinates["shard"]),
        "expert": lambda holding: words(holding.experts),
        "context\ntokens": lambda holding: words(holding.tokens),
        "tensor\nmatrices": lambda holding: words(holding.matrices),
    }
    split = {name: cell for name, cell in columns.items() if name.split()[0] in shown.layout.split_dimensions()}
    return {
        "rank": lambda holding: str(holding.rank),
        **split,
        "samples": sample_words,
        "parameters, gradients,\noptimizer state": lambda holding: ", ".join(
            share_words(shown.share(holding, state)) for state in STATES
        ),
    }


def share_words(share: Fraction) -> str:
    return "all" if share == 1 else str(share)


def _talks(shown: Holdings) -> Table:
    table = Table(title="who talks to whom")
    for name in ("along", "ranks", "what is sent"):
        table.add_column(name)
    for groups in shown.groups:
        sent = "\n".join(map(str, groups.exchanges))
        table.add_row(groups.dimension, _listed(groups), sent)
    return table


def _listed(groups: Groups) -> str:
    return "  ".join("-".join(map(str, ranks)) for ranks in groups.ranks)
