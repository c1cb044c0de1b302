"""Whole tensors that are used between columns and row layer: found in autograd's graph of the traced forward.

Between the columns and the row layer of a unit a rank computes with its own heads or features. A parameter that is
whole on every rank and is used there (a scale of the features of a head, a bias of all heads' scores, a temperature)
has on each rank the gradient of that rank's heads: a part of the sum over the ranks. Used elsewhere, its gradient is
the whole one on each rank. So for each such parameter one of these holds:

    it has a dimension of heads or features     each rank keeps its slice of it (`Regions.cuts`)
    all of its uses are inside of units         its gradients are summed after backward (`Regions.summed`)
    a unit is given it, or what is computed     the argument's gradient is summed where the unit's module begins
    from it, as an argument                     (`Regions.copied`)
    else                                        the unit stays whole (`Regions.refused`)

Marks tell where a tensor's gradient comes from, and spread from the model's output towards its inputs: the number of
a unit that uses the tensor on slices, or `WHOLE`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.sharding import Range
from samestep.parallel.tensor.modules import pattern_of
from samestep.parallel.tensor.pairs import Unit
from samestep.parallel.tensor.plan import Cut, TensorPlan, even_ranges
from samestep.parallel.tensor.sequence_parallel import Stream
from samestep.torch_internals import pytree

WHOLE = -1  # the gradient from a computation that every rank repeats
_ENTRY = -2  # and from the columns' inputs, which are copied to the region
_FED = -3  # instead of a unit's mark, through what is computed from samples as well

_COMBINES = "combines slices with what every rank computes from samples, and would have only a part of its gradient"
_VARIED = 3  # parameters of a unit of which all combinations of cuts are tried

Marks = dict[Node, set[int]]


@dataclass(frozen=True, kw_only=True)
class Regions:
    """What is done about the whole tensors that a plan's units use on slices."""

    cuts: Mapping[str, Cut] = field(default_factory=dict)  # parameters with a dimension of heads or features
    summed: frozenset[str] = frozenset()  # parameters whose gradient on a rank is a part of the sum
    # By row layer: pytree paths in (arguments, keywords) of the unit's module, of tensors whose gradients are summed.
    copied: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    entered: frozenset[str] = frozenset()  # row layers of units whose columns' inputs are among these arguments
    refused: Mapping[str, str] = field(default_factory=dict)  # members of units that must stay whole -> why
    choices: Mapping[str, "Choice"] = field(default_factory=dict)  # by the pattern of a parameter

    def try_next(self, blamed: Collection[str], tried: dict[str, int]) -> bool:
        """Advance `tried` to the next combination of cuts for units with a member in `blamed`; False after all."""
        patterns = [pattern for pattern, choice in self.choices.items() if not choice.members.isdisjoint(blamed)]
        for pattern in patterns[:_VARIED]:
            choice = self.choices[pattern]
            tried[pattern] = tried.get(pattern, 0) + 1
            if tried[pattern] < choice.options:
                return True
            tried[pattern] = 0
        return False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The ways to cut a parameter, where its shape leaves several."""

    options: int
    members: frozenset[str]  # layers of the units that use it


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """A call of a sliced module, as one node."""

    region: frozenset[int]  # units on whose slices its output is
    inputs: tuple[Node, ...]
    mark: int | None  # of its inputs; None: they are slices


def find_regions(
    model: nn.Module, trace: Trace, plan: TensorPlan, streams: Sequence[Stream], tried: Mapping[str, int]
) -> Regions:
    """Find the whole tensors that units use on slices, and what is done about each.

    `tried`: for patterns of parameters, the number of the way to cut them that is next; the last one is not to.
    """
    finder = _Finder(model, trace, plan, streams)
    cuts, choices = finder.cuts(tried)
    graph = replace(finder.graph, sliced=finder.regions_of(cuts)) if cuts else finder.graph
    return finder.settled(graph, cuts, choices)


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """The graph with the calls of sliced modules as single nodes."""

    trace: Trace
    joined: Mapping[Node, _Joined]
    sliced: Mapping[Node, frozenset[int]] = field(default_factory=dict)  # parameters of which a rank has a slice

    def inputs(self, node: Node) -> Iterable[Node]:
        if (joined := self.joined.get(node)) is not None:
            return joined.inputs
        return (before for before, _ in node.next_functions if before is not None)

    def order(self, roots: Iterable[Node], stops: Collection[Node] = ()) -> list[Node]:
        """The nodes from which the roots are computed, each after its inputs; nothing before `stops`."""
        nodes: list[Node] = []
        seen = set[Node]()
        waiting = [(root, False) for root in roots]
        while waiting:
            node, ended = waiting.pop()
            if ended:
                nodes.append(node)
            elif node not in seen:
                seen.add(node)
                waiting.append((node, True))
                waiting += [] if node in stops else [(before, False) for before in self.inputs(node)]
        return nodes

    @cached_property
    def roots(self) -> list[Node]:
        return [seen.source for call in self.trace.of("") for seen in call.outputs() if seen.source is not None]

    @cached_property
    def regions(self) -> Mapping[Node, frozenset[int]]:
        """For each node of the forward the units on whose slices it is; empty for one that every rank has whole."""
        regions: dict[Node, frozenset[int]] = {}
        for node in self.order(self.roots):
            joined = self.joined.get(node)
            if joined is not None:
                regions[node] = joined.region
            else:
                of_inputs = (regions.get(before, frozenset()) for before in self.inputs(node))
                regions[node] = self.sliced.get(node, frozenset()).union(*of_inputs)
        return regions

    @cached_property
    def fed(self) -> set[Node]:
        """The nodes that are computed from samples: from what modules make of them, and from inputs of columns."""
        entered = {node for joined in self.joined.values() if joined.mark == _ENTRY for node in joined.inputs}
        samples = {seen.identity for call in self.trace.of("") for seen in call.inputs()}
        for call in self.trace.calls:
            if call.name and any(seen.identity in samples for seen in call.inputs()):
                entered.update(seen.source for seen in call.outputs() if seen.source is not None)
        for node in self.order(self.roots):
            if any(before in entered for before in self.inputs(node)):
                entered.add(node)
        return entered

    def marks(
        self,
        roots: Iterable[Node],
        settle: Callable[[Node, int], int],
        entry: Callable[[int], int],
        stops: Collection[Node] = (),
        *,
        tell_fed: bool = False,
    ) -> Marks:
        """The marks of every whole node from which the roots are computed.

        `settle`: what becomes of a unit's mark at a node. `entry`: the mark of the inputs of a unit's columns.
        """
        marks: Marks = defaultdict(set)
        regions = self.regions
        roots = [root for root in roots if root in regions]
        for root in roots:
            marks[root].add(WHOLE)
        # Against the computation: whatever reads a node has given it its marks before the node hands them on.
        for node in reversed(self.order(roots, stops)):
            if node in stops:
                continue
            joined, region = self.joined.get(node), regions[node]
            if joined is not None:
                spread = {entry(unit) for unit in region} if joined.mark == _ENTRY else {WHOLE}
            else:
                spread = set(region) or marks[node]
                if tell_fed and not region and node in self.fed:
                    spread = {_FED}
            for before in self.inputs(node):
                if not regions[before]:
                    marks[before] |= {settle(before, mark) if mark >= 0 else mark for mark in spread}
        return marks


class _Finder:
    def __init__(self, model: nn.Module, trace: Trace, plan: TensorPlan, streams: Sequence[Stream]) -> None:
        self._model = model
        self._trace = trace
        self._plan = plan
        self._streams = streams
        self._calls: dict[str, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self._calls[call.name].append(call)
        self.graph = _Graph(trace=trace, joined=self._joined())
        self._nodes = {name: node for node, name in trace.parameters.items()}
        cut, in_parts = plan.cuts(model), plan.in_parts(model)
        whole = {id(model.get_parameter(name)) for name in cut}
        # The plan treats these itself, whatever uses them.
        self._planned = {
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in whole or name.rpartition(".")[0] in in_parts
        }
        # For each unit in blocks whose tokens are split, the nodes at which gradients are summed already.
        self._summed_at = [self._already_summed(unit) for unit in plan.units]

    @staticmethod
    def _sources(seen: Iterable[Seen]) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(value.source for value in seen if value.source is not None))

    def _joined(self) -> dict[Node, _Joined]:
        """Every call of a sliced module by the nodes of its outputs."""
        joined: dict[Node, _Joined] = {}

        def join(name: str, region: Collection[int], mark: int | None) -> None:
            for call in self._calls[name]:
                one = _Joined(region=frozenset(region), inputs=self._sources(call.inputs()), mark=mark)
                for seen in call.outputs():
                    # After an in-place change autograd continues from the base of a view.
                    joined.update({node: one for node in (seen.source, seen.base) if node is not None})

        for number, unit in enumerate(self._plan.units):
            for name in (*unit.columns, *unit.head_tables):
                join(name, {number}, _ENTRY)
            join(unit.row, (), None)
        plan = self._plan
        for name in (*plan.multiheads, *plan.gathered, *plan.tables, *plan.outputs):
            join(name, (), WHOLE)
        return joined

    def _already_summed(self, unit: Unit) -> set[Node]:
        """Where tokens are split: what blocks are given, and what is gathered for columns."""
        stream = next((stream for stream in self._streams if stream.holds(unit.row)), None)
        if stream is None:
            return set()
        gathered = [seen for name in unit.columns for call in self._calls[name] for seen in call.inputs()]
        return {*self._sources([*stream.summed(), *gathered])}

    def regions_of(self, cuts: Mapping[str, Cut]) -> dict[Node, frozenset[int]]:
        """The units that use these parameters, by their nodes."""
        marks = self._marks(self.graph)
        return {self._nodes[name]: frozenset(marks[self._nodes[name]]) for name in cuts}

    def _marks(
        self,
        graph: _Graph,
        copied: Mapping[int, set[Node]] | None = None,
        entered: Collection[int] = (),
        *,
        tell_fed: bool = False,
    ) -> Marks:
        """Marks of the whole model, if gradients of some units' arguments are summed where their modules begin."""
        copied = copied or {}

        def settle(node: Node, mark: int) -> int:
            return WHOLE if node in copied.get(mark, ()) or node in self._summed_at[mark] else mark

        return graph.marks(graph.roots, settle, lambda unit: unit if unit in entered else WHOLE, tell_fed=tell_fed)

    def cuts(self, tried: Mapping[str, int]) -> tuple[dict[str, Cut], dict[str, Choice]]:
        """The cuts of parameters that only units use, along a dimension of heads or features; and their choices."""
        cuts: dict[str, Cut] = {}
        choices: dict[str, Choice] = {}
        marks = self._marks(self.graph, tell_fed=True)
        for name, node in self._nodes.items():
            users = marks.get(node, set())
            if not users or not users.isdisjoint((WHOLE, _FED)) or name in self._planned:
                continue
            units = [self._plan.units[user] for user in sorted(users)]
            options, pattern = self._options(name, units), pattern_of(name)
            option = options[min(tried.get(pattern, 0), len(options) - 1)]
            if len(options) > 1:
                before = choices[pattern].members if pattern in choices else frozenset()
                members = before.union(*(unit.members for unit in units))
                choices[pattern] = Choice(options=len(options), members=members)
            if option is not None:
                cuts[name] = option
        return cuts, choices

    def _options(self, name: str, users: Sequence[Unit]) -> list[Cut | None]:
        """The ways in which a parameter may be cut: by each dimension with a size of its units, or not at all."""
        sizes = [self._sizes(unit) for unit in users]
        shape = self._model.get_parameter(name).shape
        cuts = [
            (dim, ranges)
            for size, ranges in sizes[0]
            for dim, of_shape in enumerate(shape)
            if size == of_shape and all((size, ranges) in others for others in sizes)
        ]
        options: list[Cut | None] = [*cuts]
        # Where a head has as many features as there are heads, a last dimension of so many is that of features.
        unit = users[0]
        head = unit.width // unit.heads.queries if unit.heads is not None else 0
        of_features = [dim for dim, _ in cuts] == [len(shape) - 1] and shape[-1] == head
        return [None, *options] if of_features else [*options, None]

    def _sizes(self, unit: Unit) -> list[tuple[int, list[list[Range]]]]:
        """The sizes of dimensions that are a unit's heads or features, with the ranges of each rank."""
        parts, heads = self._plan.parts, unit.heads
        if heads is None:
            # Gate and up may be in one.
            pieces = [[unit.width], *([[unit.width] * 2] if any(len(piece) == 2 for piece in unit.pieces) else [])]
            return [(sum(piece), even_ranges(piece, parts)) for piece in pieces]
        numbers = sorted({heads.queries} if heads.shares_keys(parts) else {heads.queries, heads.keys}, reverse=True)
        steps = (1, unit.width // heads.queries)
        return [(number * step, even_ranges([number], parts, step)) for step in steps for number in numbers]

    def settled(self, graph: _Graph, cuts: Mapping[str, Cut], choices: Mapping[str, Choice]) -> Regions:
        """Decide about all that is not cut."""
        copied: dict[int, set[Node]] = {}
        entered: set[int] = set()
        places: dict[int, frozenset[Any]] = {}
        marks = self._marks(graph)
        for number in sorted(self._mixed(graph, marks)):
            arguments = self._arguments(graph, number)
            if arguments is not None:
                places[number], copied[number], enters = arguments
                entered |= {number} if enters else set()
        marks = self._marks(graph, copied, entered)
        mixed = self._mixed(graph, marks)
        units = self._plan.units
        summed = {
            name
            for name, node in self._nodes.items()
            if marks.get(node, set()) - {WHOLE} and name not in self._planned
        }
        return Regions(
            cuts=cuts,
            summed=frozenset(summed - {*cuts}),
            copied={units[number].row: paths for number, paths in places.items()},
            entered=frozenset(units[number].row for number in entered),
            refused={name: why for number, why in mixed.items() for name in units[number].members},
            choices=choices,
        )

    def _mixed(self, graph: _Graph, marks: Marks) -> dict[int, str]:
        """The units that use on slices a tensor whose gradient could not be put together afterwards, and why."""
        reasons: dict[int, str] = {}
        direct = self._marks(self.graph, tell_fed=True)
        for name, node in self._nodes.items():
            users = marks.get(node, set())
            if WHOLE in users and name not in self._planned and not self._is_in_stream(name):
                # Others are behind a tensor that is computed from samples, which is told below.
                for user in (users & direct[node]) - {WHOLE}:
                    reasons.setdefault(
                        user,
                        f"uses {pattern_of(name)} on slices, where a rank's gradient is a part of the sum, and it is "
                        "also used elsewhere, where every rank has the whole gradient",
                    )
                for user in users - {WHOLE}:
                    reasons.setdefault(user, _COMBINES)
        for node in graph.joined:
            for user in marks.get(node, set()) - {WHOLE}:
                reasons.setdefault(user, _COMBINES)
        return reasons

    def _is_in_stream(self, name: str) -> bool:
        return any(stream.holds(name.rpartition(".")[0]) for stream in self._streams)

    def _arguments(self, graph: _Graph, number: int) -> tuple[frozenset[Any], set[Node], bool] | None:
        """The arguments of a unit's module whose gradients are to be summed, and whether columns take them too.

        None if one of them is also used outside of the columns and the region, where its gradient is the whole one.
        """
        unit = self._plan.units[number]
        calls = self._calls[holder_of(unit)]
        entry: tuple[frozenset[Any], set[Node], bool] | None = None
        nodes = set[Node]()
        for call in calls:
            arguments = {*self._sources(call.inputs())} - self._summed_at[number]
            marks = graph.marks(
                self._sources(call.outputs()),
                lambda _, mark: mark,
                lambda entered: _ENTRY if entered == number else WHOLE,
                arguments,
            )
            used = {node for node in arguments if number in marks.get(node, ())}
            enters = any(_ENTRY in marks[node] for node in used)
            if enters:  # then all inputs of columns enter here
                used |= {node for node in arguments if _ENTRY in marks.get(node, ())}
            if not used or any(marks[node] - {number, _ENTRY} for node in used):
                return None
            nodes |= used
            paths = _paths(call, used)
            if entry is not None and (entry[0], entry[2]) != (paths, enters):
                return None
            entry = paths, nodes, enters
        return entry


def holder_of(unit: Unit) -> str:
    """The attention module of a unit, or else the innermost module that holds its columns and its row layer."""
    if unit.owner is not None:
        return unit.owner
    paths = [name.split(".")[:-1] for name in unit.members]
    common: list[str] = []
    for level in zip(*paths, strict=False):
        if len({*level}) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def _paths(call: Call, nodes: Collection[Node]) -> frozenset[Any]:
    """The pytree paths of the tensors with these nodes in a call's (arguments, keywords)."""
    leaves = pytree.tree_leaves_with_path((call.arguments, dict(call.keywords)), is_leaf=_is_seen)
    return frozenset(path for path, seen in leaves if isinstance(seen, Seen) and seen.source in nodes)


def _is_seen(value: Any) -> bool:
    return isinstance(value, Seen)
