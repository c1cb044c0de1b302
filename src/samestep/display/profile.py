"""The table of a profile: where the time of a step went, on every rank."""

from rich.console import Console
from rich.table import Table

from samestep.display.console import WIDTH, plain_console
from samestep.profiling.breakdown import CATEGORIES, Profile

_MOST_RANKS = 16


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """A row for each rank, then the rank that holds the others up, and where the traces are."""
    console = console or plain_console(width=WIDTH)
    first, last = profile.steps[0], profile.steps[-1]
    table = Table(
        title=f"{profile.layout}: where a step's time goes, ms and share, mean of steps {first} to {last}",
        caption="they add up to the step, but what is overlapped: messages beside which the rank worked",
    )
    for title in ("rank", "step", *CATEGORIES, "overlapped"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in profile.ranks[:_MOST_RANKS]:
        cells = [
            f"{rank.categories[name] * 1e3:.1f} {rank.categories[name] / rank.seconds:4.0%}" for name in CATEGORIES
        ]
        table.add_row(str(rank.rank), f"{rank.seconds * 1e3:.1f}", *cells, f"{rank.overlapped * 1e3:.1f}")
    console.print(table)
    if len(profile.ranks) > _MOST_RANKS:
        console.print(f"{len(profile.ranks) - _MOST_RANKS} more ranks stand in profile.json")
    if profile.straggler is not None:
        late = profile.straggler
        console.print(
            f"straggler: rank {late.rank}: {late.own_seconds * 1e3:.1f} ms a step by itself, the others "
            f"{late.others_seconds * 1e3:.1f} ms; most of it in {late.phase}, {_KINDS[late.kind]}",
            soft_wrap=True,
        )
    if profile.usual_seconds is not None:
        console.print(f"steps without the profiler: {profile.usual_seconds * 1e3:.1f} ms", soft_wrap=True)
    console.print(f"profile: {profile.folder}", soft_wrap=True)


_KINDS = {"busy": "where it works", "idle": "where it is idle"}
