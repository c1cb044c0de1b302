"""A layout with fewer ranks that takes the same step: fewer replicas or shards, the model cut as before."""

from collections.abc import Iterator
from dataclasses import replace

from samestep.layout import Layout


def smaller(layout: Layout, fewest: int) -> Iterator[Layout]:
    """The layouts with fewer data ranks and at least `fewest` processes, the largest first."""
    dimension = "replicate" if layout.replicate > 1 else "shard"
    size = getattr(layout, dimension)
    for parts in range(size - 1, 0, -1):
        found = replace(layout, **{dimension: parts})
        if found.size < fewest:
            return
        yield found
