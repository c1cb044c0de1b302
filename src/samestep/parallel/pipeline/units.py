"""Units: the modules whose calls are assigned to pipeline stages, and between whose calls a model can be cut.

Also: the outputs of other calls that each call uses, which stages pass on.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from samestep.parallel.blocks import find_blocks, has_forward, with_forward
from samestep.parallel.calls import Call, Trace
from samestep.parallel.dataflow import Asked
from samestep.torch_internals.modules import AnyBatchNorm, own_children


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit that is not made within another unit's call."""

    unit: str
    number: int  # among the calls of this unit in one forward, from 0
    call: Call


def find_layers(model: nn.Module, trace: Trace, stages: int) -> list[str]:
    """Find the modules after which a model may be cut.

    These are the repeated layers of all lists, or the model's children if it has none. If they are too few for the
    stages, the most expensive ones are replaced by their children; if they have less than half of the FLOPs, all
    other modules with FLOPs are added.
    """
    calls = _Calls(model, trace)
    layers = calls.once(calls.called(with_forward(find_blocks(model))))
    while sum(len(trace.of(name)) for name in layers) < stages:
        opened = _opened(model, calls, layers)
        if opened is None:
            break
        layers = opened
    inside = sum(calls.flops(name) for name in layers)
    if layers and 2 * inside < trace.flops:
        others = [name for name in units_of(model, trace, layers) if name not in layers and calls.flops(name)]
        layers += calls.once(others)
    return layers


def _opened(model: nn.Module, calls: "_Calls", layers: Sequence[str]) -> list[str] | None:
    """Replace the most expensive layer that has several parts by its parts; None if no layer has.

    Of repeated layers of a custom class only those are replaced that have layers in a row themselves, such as the
    stages of a ConvNeXt; the parts of others exchange more tensors than the layers do.
    """
    for name in sorted(layers, key=calls.flops, reverse=True):
        module = model.get_submodule(name)
        parent = model.get_submodule(name.rpartition(".")[0])
        repeated = isinstance(parent, (nn.ModuleList, nn.Sequential)) and not isinstance(module, nn.Sequential)
        parts = calls.called(with_forward([part for part in module.children() if _has_parameters(part)]))
        single = module
        while len(parts) == 1:  # a wrapper of one part
            single = model.get_submodule(parts[0])
            parts = calls.called(with_forward([part for part in single.children() if _has_parameters(part)]))
        parts = [part for part in parts if len(calls.trace.of(part)) == len(calls.trace.of(name))]
        if len(parts) > 1 and (not repeated or calls.in_a_row(parts)):
            at = layers.index(name)
            return [*layers[:at], *parts, *layers[at + 1 :]]
    return None


class _Calls:
    """Counts of calls and FLOPs of a trace, by module name."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.trace = trace
        self._names = {id(module): name for name, module in model.named_modules()}
        self._counts: dict[str, int] = {}
        self._flops: dict[str, int] = {}
        for call in trace.calls:
            self._counts[call.name] = self._counts.get(call.name, 0) + 1
            self._flops[call.name] = self._flops.get(call.name, 0) + call.flops_after - call.flops_before

    def flops(self, name: str) -> int:
        return self._flops.get(name, 0)

    def called(self, modules: Iterable[nn.Module]) -> list[str]:
        """The names of the modules that the forward calls."""
        names = [self._names[id(module)] for module in modules]
        return [name for name in names if name in self._counts]

    def in_a_row(self, names: Iterable[str]) -> bool:
        """Whether some of these modules are a list in which each takes an output of the one before it."""
        lists: dict[str, list[Call]] = {}
        for call in sorted((call for name in names for call in self.trace.of(name)), key=lambda call: call.began):
            lists.setdefault(call.name.rpartition(".")[0], []).append(call)
        return any(
            len(made) > 1
            and not any(
                {seen.identity for seen in before.outputs()}.isdisjoint(seen.identity for seen in call.inputs())
                for before, call in pairwise(made)
            )
            for made in lists.values()
        )

    def once(self, names: Iterable[str]) -> list[str]:
        """Replace modules that are called several times by the innermost enclosing module that is called once.

        The number of iterations of a loop may depend on the samples. A module that the model itself calls several
        times (two sentences through one encoder) is kept. Modules that an autograd.Function calls are replaced so
        too, since its backward takes them all.
        """
        functions = {call.name for call in self.trace.calls if call.inside}
        outermost: dict[str, None] = {}
        for name in names:
            looping = name
            while looping and (self._counts.get(looping, 0) != 1 or looping in functions):
                looping = looping.rpartition(".")[0]
            outermost[looping or name] = None
        return [name for name in outermost if not any(name.startswith(f"{other}.") for other in outermost)]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that its forward updates, and so belongs to a stage."""
    return _has_parameters(module) or any(isinstance(part, AnyBatchNorm) for part in module.modules())


def units_of(model: nn.Module, trace: Trace, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The units by all of their names: layers, and the largest called modules with a state that contain no layer.

    Modules that are never called, and contain no called module, are units as well, since others may use their
    parameters.
    """
    called = {call.name for call in trace.calls}
    names = {id(module): name for name, module in model.named_modules()}
    inner = {*called, *layers}
    units: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        own = names[id(module)]  # its first name
        if not _has_state(module):
            return
        is_layer = own in layers
        opened = not own or any(layer.startswith(f"{own}.") for layer in layers)
        if not is_layer and not opened and (not has_forward(module) or own not in called):
            opened = any(name_inside.startswith(f"{own}.") for name_inside in inner)
        if is_layer or not opened:
            units[name] = module
            return
        for child_name, child in own_children(module).items():  # also a second name of the same module
            if child is not None:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return units


def unit_calls(model: nn.Module, trace: Trace, units: Mapping[str, nn.Module]) -> list[UnitCall]:
    """The calls of units in order, except calls within another unit's call, which are a part of it."""
    names = {id(module): name for name, module in model.named_modules()}
    own = {names[id(module)] for module in units.values()}
    calls: list[UnitCall] = []
    counts: dict[str, int] = {}
    ended = 0
    for call in trace.calls:  # sorted by their beginnings
        if call.name not in own or call.began < ended:
            continue
        # Calls before `ended` are within the last unit's call.
        ended = call.ended
        number = counts.get(call.name, 0)
        counts[call.name] = number + 1
        calls.append(UnitCall(unit=call.name, number=number, call=call))
    return calls


@dataclass(frozen=True, kw_only=True)
class UnitOutput:
    """An output tensor of a unit's call."""

    caller: int  # number of the call among the calls of all units
    number: int  # number of the tensor in the call's output
    changed: bool  # whether its memory is written to afterwards

    def place(self) -> tuple[int, int]:
        """The sort key."""
        return self.caller, self.number


@dataclass(frozen=True, kw_only=True)
class Need:
    """The direct dependencies of a value: outputs of units' calls, parameters, and hidden values of calls."""

    given: frozenset[UnitOutput] = frozenset()
    parameters: frozenset[str] = frozenset()  # parameters that are used outside of other calls
    hidden: frozenset[int] = frozenset()  # calls of which a value is used that is not an output

    def __or__(self, other: "Need") -> "Need":
        return Need(
            given=self.given | other.given,
            parameters=self.parameters | other.parameters,
            hidden=self.hidden | other.hidden,
        )


_NOTHING = Need()


class Needs:
    """Finds the dependencies of calls in a traced forward's dataflow.

    A search backwards from a node ends at outputs of units (which can be passed on), at parameters (which the stage
    needs), or within another unit's call (`hidden`: the value can't be passed on, so no cut may separate the two).
    """

    def __init__(self, trace: Trace, calls: Sequence[UnitCall]) -> None:
        self._nodes = trace.dataflow.nodes
        self._changed = trace.dataflow.changed
        self._calls = calls
        self._began = [call.call.began for call in calls]
        self._of_output = {began: number for number, began in enumerate(self._began)}
        self._known: dict[int, Need] = {}
        self.of_calls = self._of_each_call()
        self.of_asked = self._of_each_asked(trace.dataflow.asked)
        # Hidden values that the model returns unchanged, such as a cache, are ignored, as no loss depends on them.
        self.of_output = self._all(number for number in trace.dataflow.results if not self._is_hidden(number))

    def _of_each_call(self) -> list[Need]:
        """The dependencies of every call of a unit, including parameters that it uses itself."""
        needs = [_NOTHING] * len(self._calls)
        for number, node in enumerate(self._nodes):
            caller = self._caller(number)
            if caller is None:
                continue
            for parent in node.parents:
                if self._caller(parent) != caller:
                    needs[caller] |= self._need(parent)
        return needs

    def _of_each_asked(self, questions: Sequence[Asked]) -> list[tuple[int, Asked, Need]]:
        """What the forward asks for between the calls of units: the number of the call before which it asks, and the
        dependencies of the values."""
        between: list[tuple[int, Asked, Need]] = []
        for one in questions:
            before = bisect_right(self._began, one.time)
            if before == 0 or one.time >= self._calls[before - 1].call.ended:
                between.append((before, one, self._all(one.nodes)))
        return between

    def _caller(self, number: int) -> int | None:
        """The call in which a node was computed, or whose output it is; None for nodes between calls."""
        node = self._nodes[number]
        if node.output is not None and node.output[0] in self._of_output:
            return self._of_output[node.output[0]]
        at = bisect_right(self._began, node.time) - 1
        return at if at >= 0 and node.time < self._calls[at].call.ended and not node.parameter else None

    def _is_hidden(self, number: int) -> bool:
        """Whether a result was computed within a unit's call and is not an output of it."""
        node = self._nodes[number]
        if node.output is not None and node.output[0] not in self._of_output and self._caller(number) is None:
            return all(self._is_hidden(parent) for parent in node.parents)
        answer = self._answer(number)
        return answer is not None and bool(answer.hidden)

    def _all(self, numbers: Iterable[int]) -> Need:
        need = _NOTHING
        for number in numbers:
            need |= self._need(number)
        return need

    def _need(self, number: int) -> Need:
        """The dependencies of a node, by an iterative search, as graphs are deeper than Python's recursion limit."""
        waiting = [number]
        while waiting:
            node = waiting[-1]
            if node in self._known:
                waiting.pop()
                continue
            answer = self._answer(node)
            missing = [] if answer is not None else [p for p in self._nodes[node].parents if p not in self._known]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if answer is None:
                answer = _NOTHING
                for parent in self._nodes[node].parents:
                    answer |= self._known[parent]
            self._known[node] = answer
        return self._known[number]

    def _answer(self, number: int) -> Need | None:
        """The dependency at which a search ends; None if it continues."""
        node = self._nodes[number]
        if node.parameter is not None:
            return Need(parameters=frozenset({node.parameter}))
        caller = self._caller(number)
        if caller is None:
            return None
        if node.output is not None and node.output[0] == self._began[caller]:
            output = UnitOutput(caller=caller, number=node.output[1], changed=number in self._changed)
            return Need(given=frozenset({output}))
        return Need(hidden=frozenset({caller}))
