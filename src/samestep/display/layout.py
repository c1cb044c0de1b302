"""A layout's ranks: what each takes, computes and keeps, and which of them exchange what.

Shown in the terminal as a row a rank, and under it the groups that communicate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from rich.console import Console

from samestep.data.order import bounds
from samestep.display.tables import Table, numbers, plain_console, table, texts
from samestep.errors import LayoutError, UserError
from samestep.layout import MESH_AXES, Layout

# The model state that a rank keeps, and the ZeRO stage from which the shard axis splits it (Rajbhandari et al. 2020,
# section 5).
STATES: Mapping[str, int] = {"parameters": 3, "gradients": 2, "optimizer state": 1}

LARGEST = 1024  # most ranks in a table


@dataclass(frozen=True, kw_only=True)
class EqualPart:
    """Part `index` of `of` equal parts, counted from 0; 0 of 1 is the whole."""

    index: int = 0
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's part of the batch and of the model."""

    rank: int
    coordinates: Mapping[str, int]  # along each mesh axis
    samples: EqualPart
    positions: tuple[int, int] | None  # first and last + 1 of its samples in a global batch; None: batch size unknown
    experts: EqualPart
    tokens: EqualPart
    stages: tuple[int, ...]  # of the pipeline
    matrices: EqualPart
    kept: Mapping[str, EqualPart]  # of the state of the layers that it computes: sharded or whole
    # For a sharded model with experts, `kept` is about other parameters: of the experts a rank keeps its own.


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective or message within a group of ranks."""

    operation: str
    of: str
    when: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.of}, {self.when}"


@dataclass(frozen=True, kw_only=True)
class AxisGroups:
    """The groups of ranks along one mesh axis, and what they exchange."""

    axis: str
    ranks: tuple[tuple[int, ...], ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutHoldings:
    """What every rank of a layout holds, and the groups that communicate."""

    layout: Layout
    batch: int | None  # samples of a global batch
    stages: int  # of the pipeline, over all ranks
    ranks: tuple[Holding, ...]
    groups: tuple[AxisGroups, ...]  # of the split axes, outermost first

    def share(self, holding: Holding, state: str) -> Fraction:
        """Fraction of the whole model's state that a rank keeps, assuming stages and slices of equal size."""
        return Fraction(len(holding.stages), self.stages * holding.matrices.of * holding.kept[state].of)

    @property
    def parameters_stay_gathered(self) -> bool:
        """Whether parameters are sharded between steps and stay gathered from forward to backward (ZeRO stage 2)."""
        return self.layout.zero == 2

    def to_json(self) -> dict[str, Any]:
        """Return what each rank takes, computes and keeps as JSON; shares of the model as fractions."""
        return {
            "layout": str(self.layout),
            "processes": self.layout.size,
            "mesh": dict(zip(MESH_AXES, self.layout.mesh_shape(), strict=True)),
            "batch": self.batch,
            "stages": self.stages,
            "parameters_stay_gathered": self.parameters_stay_gathered,
            "ranks": [self._rank_to_json(holding) for holding in self.ranks],
            "groups": [asdict(groups) for groups in self.groups],
        }

    def _rank_to_json(self, holding: Holding) -> dict[str, Any]:
        share = {state: float(self.share(holding, state)) for state in STATES}
        return {**asdict(holding), "share_of_the_model": share}


def holdings(layout: Layout, batch: int | None = None) -> LayoutHoldings:
    """Compute what every rank of a layout holds; with the global batch size, also which samples.

    Raises LayoutError if the batch is too small for the layout or the schedule can't have that many stages, and
    UserError for more ranks than can be shown.
    """
    if layout.size > LARGEST:
        raise UserError(
            f'layout "{layout}": {layout.size} ranks are too many to show; '
            f"use a layout of the same kind with {LARGEST} ranks or fewer"
        )
    if batch is not None:
        layout.check_batch(batch, None)
    per_rank = _stages_per_rank(layout)
    # Ranks are numbered in the layout's order, with the last axis fastest.
    order = layout.placement
    places = (dict(zip(order, at, strict=True)) for at in product(*(range(getattr(layout, name)) for name in order)))
    grid: list[Mapping[str, int]] = [{name: place[name] for name in MESH_AXES} for place in places]
    return LayoutHoldings(
        layout=layout,
        batch=batch,
        stages=layout.pipeline * per_rank,
        ranks=tuple(_holding(layout, batch, per_rank, rank, place) for rank, place in enumerate(grid)),
        groups=tuple(
            AxisGroups(axis=name, ranks=_groups(grid, name), exchanges=_EXCHANGES[name](layout))
            for name in layout.split_axes()
        ),
    )


def _holding(layout: Layout, batch: int | None, per_rank: int, rank: int, place: Mapping[str, int]) -> Holding:
    """Compute what the rank at these coordinates holds; data ranks count along replicate, shard and expert."""
    data_rank = (place["replicate"] * layout.shard + place["shard"]) * layout.expert + place["expert"]
    samples = EqualPart(index=data_rank, of=layout.data_ranks)
    shard = EqualPart(index=place["shard"], of=layout.shard)
    if layout.zero >= 2:  # what is not an expert is sharded over both axes, and a rank's experts over one
        shard = EqualPart(index=place["shard"] * layout.expert + place["expert"], of=layout.shard * layout.expert)
    return Holding(
        rank=rank,
        coordinates=place,
        samples=samples,
        positions=None if batch is None else bounds(batch, samples.index, samples.of),
        experts=EqualPart(index=place["expert"], of=layout.expert),
        tokens=EqualPart(index=place["context"], of=layout.context),
        stages=_stages(layout, per_rank, place["pipeline"]),
        matrices=EqualPart(index=place["tensor"], of=layout.tensor),
        kept={state: shard if layout.zero >= stage else EqualPart() for state, stage in STATES.items()},
    )


def _stages_per_rank(layout: Layout) -> int:
    if layout.schedule != "zbv-zero-bubble":
        return layout.stages
    if layout.stages > 2:
        raise LayoutError(
            f'layout "{layout}": stages={layout.stages}; with schedule=zbv-zero-bubble a rank holds 2 stages'
        )
    return 2


def _stages(layout: Layout, per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank: a V (down the ranks and back up) or one round over the ranks after another.

    Qi et al. 2024, "Pipeline parallelism with controllable memory" (V); Narayanan et al. 2021, section 2.2 (rounds).
    """
    if layout.schedule == "zbv-zero-bubble":
        return (rank, 2 * layout.pipeline - 1 - rank)
    return tuple(rank + layout.pipeline * turn for turn in range(per_rank))


def _groups(grid: Sequence[Mapping[str, int]], axis: str) -> tuple[tuple[int, ...], ...]:
    """Yield groups of ranks whose coordinates differ along one axis only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(grid):
        others = tuple(place[name] for name in MESH_AXES if name != axis)
        groups.setdefault(others, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


_STEP = "once a step"
_SUM_OF_GRADIENTS = Exchange(operation="all-reduce", of="gradients", when=_STEP)
_SCATTER = Exchange(operation="reduce-scatter", of="gradients", when=_STEP)


def _along_pipeline(layout: Layout) -> tuple[Exchange, ...]:
    """What ranks along the pipeline axis send each other."""
    when = "from stage to stage, for every micro-batch"
    return (Exchange(operation="send and receive", of="activations and their gradients", when=when),)


def _along_replicate(layout: Layout) -> tuple[Exchange, ...]:
    return (_SUM_OF_GRADIENTS,)


def _along_shard(layout: Layout) -> tuple[Exchange, ...]:
    """What ranks along the shard axis send, by ZeRO's stage."""
    if layout.zero == 1:
        to_owner = Exchange(operation="reduce", of="gradients, to the rank that updates the parameter", when=_STEP)
        return (to_owner, Exchange(operation="broadcast", of="updated parameters", when=_STEP))
    when = "before every block, forward and backward" if layout.zero == 3 else "before every block, forward"
    return (Exchange(operation="all-gather", of="parameters", when=when), _SCATTER)


def _along_expert(layout: Layout) -> tuple[Exchange, ...]:
    """What ranks along the expert axis send."""
    when = "to their experts and back in every block that has them, forward and backward"
    shared = Exchange(operation="all-reduce", of="gradients of what is no expert", when=_STEP)
    if layout.zero >= 2:
        shared = Exchange(
            operation="all-gather", of="what is no expert, and reduce-scatter of its gradients", when=_STEP
        )
    return (Exchange(operation="all-to-all", of="tokens", when=when), shared)


def _along_context(layout: Layout) -> tuple[Exchange, ...]:
    """What ranks along the context axis send."""
    when = "in every attention, forward and backward"
    return (Exchange(operation="all-to-all", of="heads against tokens", when=when), _SUM_OF_GRADIENTS)


def _along_tensor(layout: Layout) -> tuple[Exchange, ...]:
    """What ranks along the tensor axis send."""
    when = "in every block, forward and backward"
    return (Exchange(operation="all-reduce (or all-gather and reduce-scatter)", of="activations", when=when),)


_EXCHANGES = {
    "pipeline": _along_pipeline,
    "replicate": _along_replicate,
    "shard": _along_shard,
    "expert": _along_expert,
    "context": _along_context,
    "tensor": _along_tensor,
}


def print_holdings(shown: LayoutHoldings, console: Console | None = None) -> None:
    """Print what ranks hold, and which groups communicate, as tables."""
    console = console or plain_console()
    console.print(_ranks(shown))
    if shown.groups:
        console.print(_talks(shown))


def words(part: EqualPart) -> str:
    """Format a part, counted from 1: "2 of 4", or "all"."""
    return "all" if part.of == 1 else f"{part.index + 1} of {part.of}"


def sample_words(holding: Holding) -> str:
    """Format a rank's samples: positions in the global batch, or its slice if the batch size is unknown."""
    if holding.positions is None:
        return words(holding.samples)
    start, stop = holding.positions
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"


def _ranks(shown: LayoutHoldings) -> Table:
    layout = shown.layout
    columns = _columns(shown)
    rows = [[cell(holding) for cell in columns.values()] for holding in shown.ranks]
    return table(numbers(*columns), rows, title=f"{layout}: {layout.size} rank{'' if layout.size == 1 else 's'}")


def _columns(shown: LayoutHoldings) -> dict[str, Callable[[Holding], str]]:
    """Title and cell function of each column; axes that the layout doesn't split are left out."""
    columns: dict[str, Callable[[Holding], str]] = {
        "pipeline\nstages": lambda holding: ", ".join(map(str, holding.stages)),
        "replicate": lambda holding: str(holding.coordinates["replicate"]),
        "shard": lambda holding: str(holding.coordinates["shard"]),
        "expert": lambda holding: words(holding.experts),
        "context\ntokens": lambda holding: words(holding.tokens),
        "tensor\nmatrices": lambda holding: words(holding.matrices),
    }
    split = {name: cell for name, cell in columns.items() if name.split()[0] in shown.layout.split_axes()}
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


def _talks(shown: LayoutHoldings) -> Table:
    rows = [[groups.axis, _listed(groups), "\n".join(map(str, groups.exchanges))] for groups in shown.groups]
    return table(texts("along", "ranks", "what is sent"), rows, title="who talks to whom")


def _listed(groups: AxisGroups) -> str:
    return "  ".join("-".join(map(str, ranks)) for ranks in groups.ranks)
