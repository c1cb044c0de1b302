"""How long collectives take over a cluster's links: rings, trees and point to point, by bandwidth and latency.

A ring moves 2 (n - 1) / n of an all-reduce's bytes through each rank, an all-gather or a reduce-scatter half of that
(Patarasuk and Yuan, 2009); a tree needs 2 log n hops instead of 2 (n - 1) (Sanders, Speck and Träff, 2009). Where a
group has several ranks on each node, a ring for each of them enters the node by another adapter, as NCCL lays them.

The model behind all of them (Hockney 1994): seconds = bytes on the busiest link / its bandwidth + hops * latency,
plus a fixed time for each call. `size` is the whole message of n ranks, as in nccl-tests, not a rank's part of it.
"""

from dataclasses import dataclass
from math import ceil, log2

from samestep.planning.hardware import Cluster


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate: how many, and how many numbers lie from one to the next."""

    size: int
    stride: int

    def on_a_node(self, cluster: Cluster) -> int:
        """How many of them share a node."""
        return max(1, min(self.size, cluster.node_size // self.stride))


@dataclass(frozen=True, kw_only=True)
class Route:
    """The bus bandwidth of a group's ring, and the time of its hops."""

    bandwidth: float  # bytes a second through each rank
    ring_seconds: float  # of one round of the ring
    tree_seconds: float  # from the leaves to the root
    name: str  # of the link that bounds it


def route(group: Group, cluster: Cluster) -> Route:
    """What a group's ring gets of the links, while all groups of the same kind run at once."""
    part = cluster.device.efficiency.link
    near = group.on_a_node(cluster)
    nodes = ceil(group.size / near)
    inside = part * cluster.inside.rate
    if nodes == 1:
        return Route(
            bandwidth=inside,
            ring_seconds=(group.size - 1) * cluster.inside.latency,
            tree_seconds=ceil(log2(max(group.size, 2))) * cluster.inside.latency,
            name=cluster.inside.name,
        )
    # All devices of a node belong to such groups, so that each has its own adapter's rate, and its ring those of
    # the group's ranks on the node.
    outside = 0.9 * cluster.between.rate * near * _taper(group, cluster)
    return Route(
        bandwidth=min(inside, outside) if near > 1 else outside,
        ring_seconds=(group.size - nodes) * cluster.inside.latency + (nodes - 1) * cluster.between.latency,
        tree_seconds=ceil(log2(max(near, 2))) * cluster.inside.latency + ceil(log2(nodes)) * cluster.between.latency,
        name=cluster.between.name if near == 1 or outside < inside else cluster.inside.name,
    )


def _taper(group: Group, cluster: Cluster) -> float:
    """The part of the full rate that is left where a group leaves a full-rate part of the fat tree."""
    spanned = ceil(group.size * group.stride / cluster.node_size)
    return cluster.taper if cluster.pod_nodes and spanned > cluster.pod_nodes else 1.0


def all_reduce(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds to sum `size` bytes over a group: by a ring or by a tree, whichever is faster."""
    if group.size == 1 or not size:
        return 0.0
    way = route(group, cluster)
    # A reduce-scatter and an all-gather, each once round the ring.
    ring = 2 * (group.size - 1) / group.size * size / way.bandwidth + 2 * way.ring_seconds
    # Up to the root and down again: more bytes than a ring, fewer hops.
    tree = 2 * size / way.bandwidth + 2 * way.tree_seconds
    return min(ring, tree) + cluster.device.efficiency.collective_seconds


def all_gather(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds until every rank has the `size` bytes of which each had its part: NCCL has a ring for it."""
    if group.size == 1 or not size:
        return 0.0
    way = route(group, cluster)
    ring = (group.size - 1) / group.size * size / way.bandwidth + way.ring_seconds
    return ring + cluster.device.efficiency.collective_seconds


# The reverse of an all-gather: the same bytes over the same links.
reduce_scatter = all_gather


def all_to_all(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds to send each other rank its part of `size` bytes: those of other nodes by the device's own adapter."""
    if group.size == 1 or not size:
        return 0.0
    near, efficiency = group.on_a_node(cluster), cluster.device.efficiency
    # The two go on at the same time, over different links: the slower one counts.
    inside = size * (near - 1) / group.size / (efficiency.link * cluster.inside.rate)
    outside = size * (group.size - near) / group.size / (0.9 * cluster.between.rate)
    latency = cluster.between.latency if group.size > near else cluster.inside.latency
    return max(inside, outside) + latency + efficiency.collective_seconds


def send(size: float, group: Group, cluster: Cluster) -> float:
    """Seconds to send `size` bytes to the next rank of a group."""
    if group.size == 1 or not size:
        return 0.0
    link = cluster.inside if group.on_a_node(cluster) > 1 else cluster.between
    return (
        size / (cluster.device.efficiency.link * link.rate)
        + 2 * link.latency
        + cluster.device.efficiency.collective_seconds
    )
