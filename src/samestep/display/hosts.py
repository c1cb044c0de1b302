"""Hosts and their ranks: which rank goes where, and which mesh axes of a layout stay inside a host.

Shown in the terminal: what was read, what each host offers, and what each rank would get.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from samestep.display.layout import holdings
from samestep.display.tables import Table, numbers, plain_console, table, texts
from samestep.errors import LayoutError
from samestep.launch.environments.base import Cluster, FoundCluster, Slots
from samestep.layout import DEFAULT_ORDER, Layout

# Mesh axes whose groups communicate in every block, so that a slow network would slow each block.
_CHATTY = ("tensor", "context")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Host, slot and coordinates of one rank."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    slot: int  # index of the slot on its host; for accelerators, among those visible there
    coordinates: Mapping[str, int] | None = None  # along each split axis of the layout
    cores: str | None = None  # where they are known


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """How many groups of a mesh axis stay inside a host, and how many span hosts."""

    axis: str
    inside: int
    across: int


@dataclass(frozen=True, kw_only=True)
class HostsShown:
    """The hosts found, and the placement of every rank."""

    found: FoundCluster
    ranks: tuple[RankPlace, ...]
    layout: Layout | None = None
    crossings: tuple[Crossing, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings about groups that span hosts, with a remedy."""
        return [
            _warning(self.found.cluster, self.layout, crossing)
            for crossing in self.crossings
            if self.layout is not None and crossing.axis in _CHATTY and crossing.across
        ]

    def to_json(self) -> dict[str, Any]:
        """Hosts, ranks, and the groups of each mesh axis that stay in a host or cross hosts."""
        cluster = self.found.cluster
        return {
            "place": cluster.place,
            "job": cluster.job,
            "this": cluster.this,
            "read": [asdict(reading) for reading in self.found.read],
            "slots_from": self.found.slots_from,
            "on_every_host": self.found.on_every_host,
            "hosts": [asdict(host) for host in cluster.hosts],
            "world_size": cluster.world_size,
            "ranks": [asdict(rank) for rank in self.ranks],
            "layout": None if self.layout is None else str(self.layout),
            "axes": [asdict(crossing) for crossing in self.crossings],
            "warnings": self.warnings,
        }


def hosts_shown(found_cluster: FoundCluster, layout: str | None = None, cores: Sequence[str] = ()) -> HostsShown:
    """Place the ranks on the hosts found; with a layout, also count the groups that span hosts.

    `cores` describes the cores of this host's ranks. Raises LayoutError unless the layout has one rank for each slot.
    """
    cluster = found_cluster.cluster
    if layout is None:
        return HostsShown(found=found_cluster, ranks=_places(cluster, cores))
    fitting = _fitting(layout, cluster)
    held = holdings(fitting)
    split = fitting.split_axes()
    coordinates = [{name: rank.coordinates[name] for name in split} for rank in held.ranks]
    places = _places(cluster, cores, coordinates)
    crossings = []
    for groups in held.groups:
        across = sum(len({places[rank].node_rank for rank in group}) > 1 for group in groups.ranks)
        inside = len(groups.ranks) - across
        crossings.append(Crossing(axis=groups.axis, inside=inside, across=across))
    return HostsShown(found=found_cluster, ranks=places, layout=fitting, crossings=tuple(crossings))


def _fitting(text: str, cluster: Cluster) -> Layout:
    """Parse the layout for as many processes as there are slots."""
    try:
        return Layout.parse(text, cluster.world_size)
    except LayoutError as error:
        raise LayoutError(
            f"{error}; the hosts have {cluster.world_size} slots: --num-procs N gives each host N, --num-nodes "
            "and --include take fewer hosts"
        ) from None


def _places(
    cluster: Cluster, cores: Sequence[str], coordinates: Sequence[Mapping[str, int]] | None = None
) -> tuple[RankPlace, ...]:
    """Number the ranks host by host; cores are known on this host only."""
    places: list[RankPlace] = []
    for node_rank, host in enumerate(cluster.hosts):
        for local_rank in range(host.slots):
            ours = node_rank == cluster.this and local_rank < len(cores)
            places.append(
                RankPlace(
                    rank=len(places),
                    host=host.name,
                    node_rank=node_rank,
                    local_rank=local_rank,
                    slot=local_rank if host.chosen is None else host.chosen[local_rank],
                    coordinates=None if coordinates is None else coordinates[len(places)],
                    cores=cores[local_rank] if ours else None,
                )
            )
    return tuple(places)


def _warning(cluster: Cluster, layout: Layout, crossing: Crossing) -> str:
    """Describe groups that communicate in every block and span hosts, and what to change."""
    groups = crossing.inside + crossing.across
    crossings = f"{crossing.across} of {groups} {crossing.axis} groups cross hosts, and they talk in every block"
    fewest = min(host.slots for host in cluster.hosts)
    size = getattr(layout, crossing.axis)
    if size > fewest:
        return f"{crossings}; a host has {fewest} slots, so {crossing.axis} {fewest} or less stays inside one"
    if fewest % size:
        return (
            f"{crossings}; {size} ranks don't divide the {fewest} slots of a host: "
            f"--num-procs {fewest // size * size}"
        )
    if layout.order != DEFAULT_ORDER:
        return f"{crossings}; order={DEFAULT_ORDER}, the default, keeps the nearest ranks together"
    return f"{crossings}; hosts with equal slots, or fewer ranks a host, would keep them inside"


_MOST = 64  # most ranks in the table

_SLOTS: dict[Slots, str] = {"accelerators": "accelerators", "cores": "cores", "listed": "as listed"}


def print_hosts(shown: HostsShown, console: Console | None = None) -> None:
    """Print the hosts found and the ranks as tables."""
    console = console or plain_console(highlight=False)
    console.print(_read(shown.found))
    console.print(_hosts(shown.found))
    console.print(_ranks(shown))
    if len(shown.ranks) > _MOST:
        console.print(f"the first {_MOST} of {len(shown.ranks)} ranks; --json FILE has them all", soft_wrap=True)
    if shown.crossings:
        console.print(_crossings(shown))
    for warning in shown.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)


def _read(found_cluster: FoundCluster) -> Table:
    cluster = found_cluster.cluster
    title = f"found: {cluster.place}" + (f", job {cluster.job}" if cluster.job else "")
    return table(
        texts("read", "value"), [[reading.source, reading.value] for reading in found_cluster.read], title=title
    )


def _hosts(found_cluster: FoundCluster) -> Table:
    cluster = found_cluster.cluster
    rows = []
    for index, host in enumerate(cluster.hosts):
        chosen = "" if host.chosen is None else f" ({', '.join(map(str, host.chosen))})"
        here = "  <- this machine" if index == cluster.this else ""
        rows.append([str(index), host.name + here, f"{host.slots}{chosen}", _SLOTS[found_cluster.slots_from]])
    columns = [*numbers("node rank"), *texts("host"), *numbers("slots"), *texts("counted from")]
    title = f"{_count(len(cluster.hosts), 'host')}, {_count(cluster.world_size, 'slot')}"
    return table(columns, rows, title=title)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranks(shown: HostsShown) -> Table:
    """A row a rank. Without an accelerator a rank's device is the CPU, and its slot stands for cores."""
    title = _count(len(shown.ranks), "rank") + ("" if shown.layout is None else f" as {shown.layout}")
    split = () if shown.layout is None else shown.layout.split_axes()
    with_cores = any(rank.cores is not None for rank in shown.ranks)
    device = {"accelerators": "device", "cores": "slot (CPU)", "listed": "device\nor slot"}[shown.found.slots_from]
    columns = [
        *numbers("rank"),
        *texts("host"),
        *numbers("node\nrank", "local\nrank", device),
        *texts(*(["cores"] if with_cores else [])),
        *numbers(*split),
    ]
    return table(columns, [_cells(rank, with_cores=with_cores) for rank in shown.ranks[:_MOST]], title=title)


def _cells(rank: RankPlace, *, with_cores: bool) -> list[str]:
    plain = [str(rank.rank), rank.host, str(rank.node_rank), str(rank.local_rank), str(rank.slot)]
    cores = [rank.cores or "-"] if with_cores else []
    return [*plain, *cores, *map(str, (rank.coordinates or {}).values())]


def _crossings(shown: HostsShown) -> Table:
    """For each mesh axis, groups inside a host and across hosts."""
    rows = [[crossing.axis, str(crossing.inside), str(crossing.across)] for crossing in shown.crossings]
    columns = [*texts("along"), *numbers("inside a host", "across hosts")]
    return table(columns, rows, title="groups of ranks that exchange messages")
