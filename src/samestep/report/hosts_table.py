"""Hosts and their ranks in the terminal: what was read, what each host offers, what each rank would get."""

from rich.console import Console
from rich.table import Table

from samestep.cluster.discover.place import Found, Slots
from samestep.report.hosts import HostsShown, RankPlace

_MOST = 64  # ranks that somebody reads

_SLOTS: dict[Slots, str] = {"accelerators": "accelerators", "cores": "cores", "listed": "as listed"}


def print_hosts(shown: HostsShown, console: Console | None = None) -> None:
    console = console or Console(markup=False, emoji=False, highlight=False)
    console.print(_read(shown.found))
    console.print(_hosts(shown.found))
    console.print(_ranks(shown))
    if len(shown.ranks) > _MOST:
        console.print(f"the first {_MOST} of {len(shown.ranks)} ranks; --json FILE has them all")
    if shown.crossings:
        console.print(_crossings(shown))
    for warning in shown.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)


def _read(found: Found) -> Table:
    cluster = found.cluster
    table = Table(title=f"found: {cluster.place}" + (f", job {cluster.job}" if cluster.job else ""))
    table.add_column("read")
    table.add_column("value", overflow="fold")
    for each in found.read:
        table.add_row(each.source, each.value)
    return table


def _hosts(found: Found) -> Table:
    cluster = found.cluster
    table = Table(title=f"{_count(len(cluster.hosts), 'host')}, {_count(cluster.world_size, 'slot')}")
    table.add_column("node rank", justify="right")
    table.add_column("host")
    table.add_column("slots", justify="right")
    table.add_column("counted from")
    for index, host in enumerate(cluster.hosts):
        chosen = "" if host.chosen is None else f" ({', '.join(map(str, host.chosen))})"
        here = "  <- this machine" if index == cluster.this else ""
        table.add_row(str(index), host.name + here, f"{host.slots}{chosen}", _SLOTS[found.slots_from])
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranks(shown: HostsShown) -> Table:
    """A row a rank. Without an accelerator a rank's device is the CPU, and its slot stands for cores."""
    table = Table(title=_count(len(shown.ranks), "rank") + ("" if shown.layout is None else f" as {shown.layout}"))
    split = () if shown.layout is None else shown.layout.split_dimensions()
    with_cores = any(rank.cores is not None for rank in shown.ranks)
    device = {"accelerators": "device", "cores": "slot (CPU)", "listed": "device\nor slot"}[shown.found.slots_from]
    for name in ("rank", "host", "node\nrank", "local\nrank", device, *(["cores"] if with_cores else []), *split):
        table.add_column(name, justify="left" if name in ("host", "cores") else "right")
    for rank in shown.ranks[:_MOST]:
        table.add_row(*_cells(rank, with_cores=with_cores))
    return table


def _cells(rank: RankPlace, *, with_cores: bool) -> list[str]:
    plain = [str(rank.rank), rank.host, str(rank.node_rank), str(rank.local_rank), str(rank.slot)]
    cores = [rank.cores or "-"] if with_cores else []
    return [*plain, *cores, *map(str, (rank.coordinates or {}).values())]


def _crossings(shown: HostsShown) -> Table:
    table = Table(title="groups of ranks that exchange messages")
    for name in ("along", "inside a host", "across hosts"):
        table.add_column(name, justify="left" if name == "along" else "right")
    for crossing in shown.crossings:
        table.add_row(crossing.dimension, str(crossing.inside), str(crossing.across))
    return table
