"""Units: the modules of which each call belongs to one pipeline stage, and between whose calls a model can be cut.

And what each call takes that other calls have given, which is what stages hand on.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from samestep.parallel.blocks import find_blocks, has_forward, with_forward
from samestep.parallel.calls import Call, Trace


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit, of those that no other unit makes."""

    unit: str
    number: int  # of the calls of this unit in one forward, from 0
    call: Call


def find_layers(model: nn.Module, trace: Trace, stages: int) -> list[str]:
    """The modules after which a model may be cut.

    The repeated layers, in however many lists they stand, or the model's parts where it has none. Where these are
    too few for the stages the most expensive are opened, and where they hold less than half of the computation
    all that compute are taken beside them.
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
    """The layers with parts in place of the most expensive that has several; None where none has.

    A repeated layer of a class of its own stays as it is: its parts hand more to each other than it hands on.
    """
    for name in sorted(layers, key=calls.flops, reverse=True):
        module = model.get_submodule(name)
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and not isinstance(module, nn.Sequential):
            continue
        parts = calls.called(with_forward([part for part in module.children() if _has_parameters(part)]))
        single = module
        while len(parts) == 1:  # a wrapper of one part
            single = model.get_submodule(parts[0])
            parts = calls.called(with_forward([part for part in single.children() if _has_parameters(part)]))
        parts = [part for part in parts if len(calls.trace.of(part)) == len(calls.trace.of(name))]
        if len(parts) > 1:
            at = layers.index(name)
            return [*layers[:at], *parts, *layers[at + 1 :]]
    return None


class _Calls:
    """What a trace knows of modules, by their names."""

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
        """The names of those that the forward calls."""
        names = [self._names[id(module)] for module in modules]
        return [name for name in names if name in self._counts]

    def once(self, names: Iterable[str]) -> list[str]:
        """In place of modules that another one calls again and again in a loop, the other one.

        How often a loop runs may depend on the samples, and the calls of one layer are one after the other. A model
        that calls a module several times by itself (two sentences through one encoder) is none.
        """
        found: dict[str, None] = {}
        for name in names:
            looping = name
            while looping and self._counts.get(looping, 0) != 1:
                looping = looping.rpartition(".")[0]
            found[looping or name] = None
        return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def units_of(model: nn.Module, trace: Trace, layers: Sequence[str]) -> dict[str, nn.Module]:
    """By every name of theirs: the layers, and the largest modules with parameters that are called and contain none.

    Modules that are never called, nor any part of them, are units as well: other modules may use
    their parameters.
    """
    called = {call.name for call in trace.calls}
    names = {id(module): name for name, module in model.named_modules()}
    inner = {*called, *layers}
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        own = names[id(module)]  # its first name
        if not _has_parameters(module):
            return
        is_layer = own in layers
        opened = not own or any(layer.startswith(f"{own}.") for layer in layers)
        if not is_layer and not opened and (not has_forward(module) or own not in called):
            opened = any(each.startswith(f"{own}.") for each in inner)
        if is_layer or not opened:
            found[name] = module
            return
        for child_name, child in module._modules.items():  # also a second name of the same module
            if child is not None:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def unit_calls(model: nn.Module, trace: Trace, units: Mapping[str, nn.Module]) -> list[UnitCall]:
    """The calls of units, in their order. What a unit calls of other units is a part of its own call."""
    names = {id(module): name for name, module in model.named_modules()}
    own = {names[id(module)] for module in units.values()}
    found: list[UnitCall] = []
    counts: dict[str, int] = {}
    ended = 0
    for call in trace.calls:  # sorted by their beginnings
        if call.name not in own or call.began < ended:
            continue
        # Calls within a unit's call are a part of it: the next one counts after its end.
        ended = call.ended
        number = counts.get(call.name, 0)
        counts[call.name] = number + 1
        found.append(UnitCall(unit=call.name, number=number, call=call))
    return found


@dataclass(frozen=True, kw_only=True)
class UnitOutput:
    """A tensor of what a unit's call gives."""

    caller: int  # the number of the call among those of all units
    number: int  # of the tensor among those of the call's output
    changed: bool  # whether its memory is written to afterwards

    def place(self) -> tuple[int, int]:
        """What to sort by."""
        return self.caller, self.number


@dataclass(frozen=True, kw_only=True)
class Need:
    """What has to be known to compute something, not looking behind what units' calls give."""

    given: frozenset[UnitOutput] = frozenset()
    parameters: frozenset[str] = frozenset()  # read outside of all other calls
    hidden: frozenset[int] = frozenset()  # calls of which something is read that they do not give

    def __or__(self, other: "Need") -> "Need":
        return Need(
            given=self.given | other.given,
            parameters=self.parameters | other.parameters,
            hidden=self.hidden | other.hidden,
        )


_NOTHING = Need()


class Needs:
    """Looked up in a traced forward's dataflow.

    A node of the dataflow is a tensor that was computed at some time of the trace; its parents are what it was
    computed from. A search from a tensor backwards ends at outputs of units (they can be handed on), at parameters
    (the stage needs them), or within another unit's call (`hidden`: it can't be handed on, so no cut may lie between
    the two).
    """

    def __init__(self, trace: Trace, calls: Sequence[UnitCall]) -> None:
        self._nodes = trace.dataflow.nodes
        self._changed = trace.dataflow.changed
        self._calls = calls
        self._began = [each.call.began for each in calls]
        self._of_output = {began: number for number, began in enumerate(self._began)}
        self._known: dict[int, Need] = {}
        self.of_calls = self._of_each_call()
        # What a unit keeps to itself and the model gives as it is, such as a cache, no loss is computed from.
        self.of_output = self._all(number for number in trace.dataflow.results if not self._is_hidden(number))

    def _of_each_call(self) -> list[Need]:
        """Of every call of a unit. Parameters that it reads itself are among them."""
        found = [_NOTHING] * len(self._calls)
        for number, node in enumerate(self._nodes):
            caller = self._caller(number)
            if caller is None:
                continue
            for parent in node.parents:
                if self._caller(parent) != caller:
                    found[caller] |= self._need(parent)
        return found

    def _caller(self, number: int) -> int | None:
        """The call in which a node was computed, or whose output it is; None for what stands between the calls."""
        node = self._nodes[number]
        if node.output is not None and node.output[0] in self._of_output:
            return self._of_output[node.output[0]]
        at = bisect_right(self._began, node.time) - 1
        return at if at >= 0 and node.time < self._calls[at].call.ended and not node.parameter else None

    def _is_hidden(self, number: int) -> bool:
        """Whether a result is something that a unit computes and doesn't give."""
        node = self._nodes[number]
        if node.output is not None and node.output[0] not in self._of_output and self._caller(number) is None:
            return all(self._is_hidden(parent) for parent in node.parents)
        answer = self._answer(number)
        return answer is not None and bool(answer.hidden)

    def _all(self, numbers: Iterable[int]) -> Need:
        found = _NOTHING
        for number in numbers:
            found |= self._need(number)
        return found

    def _need(self, number: int) -> Need:
        """What a node is computed from, by an iterative walk: models are deeper than Python's stack of calls."""
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
        """Where a search ends: at what a call gives, at a parameter; None where it goes on."""
        node = self._nodes[number]
        if node.parameter is not None:
            return Need(parameters=frozenset({node.parameter}))
        caller = self._caller(number)
        if caller is None:
            return None
        if node.output is not None and node.output[0] == self._began[caller]:
            given = UnitOutput(caller=caller, number=node.output[1], changed=number in self._changed)
            return Need(given=frozenset({given}))
        return Need(hidden=frozenset({caller}))
