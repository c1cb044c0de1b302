"""Times of collectives over a cluster's links: rings, trees and point to point, by bandwidth and latency.

A ring moves 2 (n - 1) / n of an all-reduce's bytes through each rank, and an all-gather or a reduce-scatter half of
that (Patarasuk and Yuan, 2009). A tree needs 2 log n hops instead of 2 (n - 1) (Sanders, Speck and Träff, 2009). If a
group has several ranks on each node, there is a ring for each of them, and each enters the node by another adapter,
as NCCL builds them.

All follow one model (Hockney 1994): seconds = bytes on the busiest link / its bandwidth + hops * latency, plus a
fixed time per call. `size` is the message of all n ranks together, as in nccl-tests, not one rank's part of it.
"""

from dataclasses import dataclass
from math import ceil, log2

from samestep.planning.hardware import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks of a collective: their number, and the difference of the numbers of two neighbours."""

    size: int
    stride: int

    def on_a_node(self, cluster: ClusterSpec) -> int:
        """The number of the group's ranks that share a node."""
        return max(1, min(self.size, cluster.node_size // self.stride))


@dataclass(frozen=True, kw_only=True)
class Route:
    """The bus bandwidth of a group's ring, and the latency of its hops."""

    bandwidth: float  # bytes per second through each rank
    ring_seconds: float  # latency of one round of the ring
    tree_seconds: float  # latency from the leaves to the root
    name: str  # name of the link that limits the bandwidth


def route(group: RankGroup, cluster: ClusterSpec) -> Route:
    """The bandwidth and latency of a group's ring while all groups of the same mesh axis run at once."""
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
    # All devices of a node are in such groups, so each has its own adapter's rate, and a ring has the adapters of the
    # group's ranks on the node.
    outside = 0.9 * cluster.between.rate * near * _taper(group, cluster)
    return Route(
        bandwidth=min(inside, outside) if near > 1 else outside,
        ring_seconds=(group.size - nodes) * cluster.inside.latency + (nodes - 1) * cluster.between.latency,
        tree_seconds=ceil(log2(max(near, 2))) * cluster.inside.latency + ceil(log2(nodes)) * cluster.between.latency,
        name=cluster.between.name if near == 1 or outside < inside else cluster.inside.name,
    )


def _taper(group: RankGroup, cluster: ClusterSpec) -> float:
    """Return the fraction of the full rate that a group gets: `cluster.taper` if it spans several pods, else 1."""
    spanned = ceil(group.size * group.stride / cluster.node_size)
    return cluster.taper if cluster.pod_nodes and spanned > cluster.pod_nodes else 1.0


def all_reduce(size: float, group: RankGroup, cluster: ClusterSpec) -> float:
    """Seconds to sum `size` bytes over a group: by a ring or by a tree, whichever is faster."""
    if group.size == 1 or not size:
        return 0.0
    way = route(group, cluster)
    # A reduce-scatter and an all-gather, each one round of the ring.
    ring = 2 * (group.size - 1) / group.size * size / way.bandwidth + 2 * way.ring_seconds
    # Up to the root and back down: more bytes than a ring, but fewer hops.
    tree = 2 * size / way.bandwidth + 2 * way.tree_seconds
    return min(ring, tree) + cluster.device.efficiency.collective_seconds


def all_gather(size: float, group: RankGroup, cluster: ClusterSpec) -> float:
    """Seconds until every rank has all `size` bytes, of which each had a part: by a ring, as in NCCL."""
    if group.size == 1 or not size:
        return 0.0
    way = route(group, cluster)
    ring = (group.size - 1) / group.size * size / way.bandwidth + way.ring_seconds
    return ring + cluster.device.efficiency.collective_seconds


# The reverse of an all-gather: the same bytes over the same links.
reduce_scatter = all_gather


def all_to_all(size: float, group: RankGroup, cluster: ClusterSpec) -> float:
    """Seconds to send every other rank its part of `size` bytes: to other nodes through the device's own adapter."""
    if group.size == 1 or not size:
        return 0.0
    near, efficiency = group.on_a_node(cluster), cluster.device.efficiency
    # Both run at the same time over different links, so the slower one counts.
    inside = size * (near - 1) / group.size / (efficiency.link * cluster.inside.rate)
    outside = size * (group.size - near) / group.size / (0.9 * cluster.between.rate)
    latency = cluster.between.latency if group.size > near else cluster.inside.latency
    return max(inside, outside) + latency + efficiency.collective_seconds


def send(size: float, group: RankGroup, cluster: ClusterSpec) -> float:
    """Seconds to send `size` bytes to the next rank of a group."""
    if group.size == 1 or not size:
        return 0.0
    link = cluster.inside if group.on_a_node(cluster) > 1 else cluster.between
    return (
        size / (cluster.device.efficiency.link * link.rate)
        + 2 * link.latency
        + cluster.device.efficiency.collective_seconds
    )
