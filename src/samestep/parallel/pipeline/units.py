"""Units: the modules of which each call belongs to one pipeline stage, and between whose calls a model can be cut."""

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

    Modules that nobody calls, and none of whose parts anybody calls, are units as well: other modules may use
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
        ended = call.ended
        number = counts.get(call.name, 0)
        counts[call.name] = number + 1
        found.append(UnitCall(unit=call.name, number=number, call=call))
    return found
