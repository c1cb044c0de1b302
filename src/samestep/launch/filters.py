"""Selects the hosts and slots that a job uses: by inclusion, exclusion, number of hosts, and ranks on each."""

import re
from collections.abc import Mapping
from dataclasses import replace

from samestep import environment
from samestep.errors import UserError, closest
from samestep.launch.environments.base import Cluster, FoundCluster, Host
from samestep.launch.options import HostOptions
from samestep.limits import MOST_RANKS_A_HOST, check_whole
from samestep.ranks import DeviceChoice

_SLOTS = re.compile(r"\d{1,6}(?:,\d{1,6})*", re.ASCII)
_FORM = 'write HOST, or HOST:SLOT,SLOT, with @ between hosts, such as "worker-2:0,1@worker-3"'
_HERE = ("localhost", "127.0.0.1")


def apply(
    found_cluster: FoundCluster, options: HostOptions, environ: Mapping[str, str], device: DeviceChoice = "auto"
) -> FoundCluster:
    """Return the hosts and slots that a job uses, in their order.

    Include and exclude have the syntax of DeepSpeed's launcher. Raises UserError for a host or slot that isn't there,
    for more than there is, and if nothing is left.
    """
    if options.include is not None and options.exclude is not None:
        raise UserError("--include and --exclude are both given; one of them says all")
    on_cores = found_cluster.slots_from == "cores" or device == "cpu"
    cluster = found_cluster.cluster if on_cores else _visible(found_cluster.cluster, environ)
    if options.include is not None:
        cluster = _included(cluster, options.include)
    if options.exclude is not None:
        cluster = _excluded(cluster, options.exclude)
    if options.num_nodes is not None:
        cluster = _first_hosts(cluster, options.num_nodes)
    if options.num_procs is not None:
        cluster = _so_many_ranks(cluster, options.num_procs, shared=found_cluster.slots_from == "cores")
    return replace(found_cluster, cluster=cluster)


def _visible(cluster: Cluster, environ: Mapping[str, str]) -> Cluster:
    """Limit this host's slots to its visible devices.

    Not in one of several ranks of a host, whose launcher may have left it only its own device.
    """
    visible, ranks = environment.visible_devices(environ), environment.ranks(environ)
    if ranks is not None and ranks.local_world_size > 1:
        return cluster
    if visible is None or not visible.devices or cluster.this is None:
        return cluster
    return _with_hosts(
        cluster,
        {
            index: replace(host, slots=min(host.slots, len(visible.devices))) if index == cluster.this else host
            for index, host in enumerate(cluster.hosts)
        },
    )


def _included(cluster: Cluster, text: str) -> Cluster:
    """Keep the hosts, or slots of them, that --include names."""
    chosen = _parse(cluster, "--include", text)
    kept = {
        index: _choose(cluster.hosts[index], slots) if slots else cluster.hosts[index]
        for index, slots in sorted(chosen.items())
    }
    return _with_hosts(cluster, kept)


def _excluded(cluster: Cluster, text: str) -> Cluster:
    """Remove the hosts, or slots of them, that --exclude names. Raises UserError if nothing is left."""
    unwanted = _parse(cluster, "--exclude", text)
    kept: dict[int, Host] = {}
    for index, host in enumerate(cluster.hosts):
        if index not in unwanted:
            kept[index] = host
        elif left := set(range(host.slots)) - unwanted[index] if unwanted[index] else None:
            kept[index] = _choose(host, left)
    if not kept:
        raise UserError(f'--exclude "{text}" leaves no slot of {_names(cluster)}; exclude fewer')
    return _with_hosts(cluster, kept)


def _parse(cluster: Cluster, flag: str, text: str) -> dict[int, set[int]]:
    """Parse the named slots of each host; empty: the whole host."""
    slots_of: dict[int, set[int]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().rpartition(":") if _numbered(part) else (part.strip(), "", "")
        if not name or (colon and not _SLOTS.fullmatch(slots)):
            raise UserError(f'{flag} "{text}": "{part}" names no slots of a host; {_FORM}')
        if len(several := re.split(r"[\s,;]+", part.strip())) > 1 and not colon:
            raise UserError(f'{flag} "{text}": hosts are separated by @; write "{"@".join(several)}"')
        index = _index(cluster, name, f'{flag} "{text}"')
        host = cluster.hosts[index]
        numbers = {int(number) for number in slots.split(",")} if colon else set()
        beyond = sorted(number for number in numbers if number >= host.slots)
        if beyond:
            there = "slot 0" if host.slots == 1 else f"slots 0 to {host.slots - 1}"
            raise UserError(f'{flag} "{text}": {host.name} has {there}, and no slot {beyond[0]}')
        if index in slots_of and not (numbers and slots_of[index]):
            slots_of[index] = set()  # a host that is also named as a whole counts as a whole
        else:
            slots_of.setdefault(index, set()).update(numbers)
    return slots_of


def _numbered(part: str) -> bool:
    """Whether slots follow the name; an IPv6 address with slots is in brackets."""
    return part.count(":") == 1 or "]:" in part


def _index(cluster: Cluster, name: str, place: str) -> int:
    """Return a host's index by name; "localhost" is this one. Raises UserError for an unknown name."""
    plain = name.removeprefix("[").removesuffix("]")
    names = [host.name for host in cluster.hosts]
    if plain in names:
        return names.index(plain)
    if plain in _HERE and cluster.this is not None:
        return cluster.this
    raise UserError(f'{place}: there is no host "{name}"; {closest(name, names)}')


def _choose(host: Host, slots: set[int]) -> Host:
    """Return a host with these of its remaining slots only, by index."""
    there = host.chosen if host.chosen is not None else tuple(range(host.slots))
    chosen = tuple(there[slot] for slot in sorted(slots))
    return replace(host, slots=len(chosen), chosen=chosen)


def _first_hosts(cluster: Cluster, count: int) -> Cluster:
    """Keep the first --num-nodes hosts."""
    if not 0 < count <= len(cluster.hosts):
        there = f"there {'is' if len(cluster.hosts) == 1 else 'are'} {len(cluster.hosts)}: {_names(cluster)}"
        raise UserError(f"--num-nodes is {count}, and {there}; use a number from 1 to {len(cluster.hosts)}")
    return _with_hosts(cluster, dict(enumerate(cluster.hosts[:count])))


def _so_many_ranks(cluster: Cluster, count: int, *, shared: bool) -> Cluster:
    """Keep --num-procs slots on each host. Raises UserError if a host has fewer."""
    check_whole("--num-procs", count, most=MOST_RANKS_A_HOST)
    small = min(cluster.hosts, key=lambda host: host.slots)
    if count > small.slots and not (shared and small.chosen is None):
        there = "1 slot; use 1" if small.slots == 1 else f"{small.slots} slots; use {small.slots} or fewer"
        without = f", or --exclude {small.name}" if len(cluster.hosts) > 1 else ""
        raise UserError(f"--num-procs is {count}, and {small.name} has {there}{without}")
    hosts = {
        index: replace(host, slots=count, chosen=None if host.chosen is None else host.chosen[:count])
        for index, host in enumerate(cluster.hosts)
    }
    return _with_hosts(cluster, hosts)


def _with_hosts(cluster: Cluster, kept: Mapping[int, Host]) -> Cluster:
    """Return the cluster with the kept hosts, by their former indices."""
    positions = list(kept)
    this = positions.index(cluster.this) if cluster.this is not None and cluster.this in kept else None
    return replace(cluster, hosts=tuple(kept.values()), this=this)


def _names(cluster: Cluster) -> str:
    """Join the first names of a cluster's hosts, for a message."""
    names = [host.name for host in cluster.hosts]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
