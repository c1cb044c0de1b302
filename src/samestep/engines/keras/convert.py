"""From a PyTorch model to a Keras model with the same weights, by what its forward calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from samestep.engines.keras.layers import FUNCTIONS, MODULES, Tools, Weight, channels_first, channels_last
from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A Keras model, and where the PyTorch model's parameters stand in it."""

    model: Any  # takes and gives tensors with the dimensions in PyTorch's order
    weights: Mapping[str, Weight]  # by the parameter's name

    def parameter(self, name: str) -> Tensor:
        """The value of a parameter in PyTorch's layout, on the CPU."""
        return to_torch(self.weights[name], self.weights[name].variable.numpy())

    def assign(self, name: str, value: Tensor) -> None:
        """Give a parameter a value that stands in PyTorch's layout."""
        self.weights[name].variable.assign(to_keras(self.weights[name], value))


def to_torch(weight: Weight, value: Any) -> Tensor:
    """A variable's value, an array, as the parameter that it stands for."""
    found = torch.from_numpy(value)
    if weight.axes is None:
        return found
    back = [weight.axes.index(axis) for axis in range(len(weight.axes))]
    return found.permute(back).contiguous()


def to_keras(weight: Weight, value: Tensor) -> Any:
    """A parameter's value as its variable has it, an array."""
    value = value.detach().cpu()
    return (value if weight.axes is None else value.permute(weight.axes)).contiguous().numpy()


def check(model: nn.Module) -> None:
    """Raise UserError for a part of a model that has no counterpart here. TensorFlow is not needed for it."""
    for node in _graph(model).nodes:
        _CHECKS[node.op](model, node)
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if id(parameter) in owners:
                raise UserError(
                    f"{owners[id(parameter)]} and {name} are one tied parameter, which engine keras has not; "
                    "engine native would do"
                )
            owners[id(parameter)] = name


def convert(model: nn.Module, tools: Tools, example: Any) -> Converted:
    """Make the Keras model in the strategy's scope that is entered. `example`: what the model may be called with."""
    check(model)
    if not isinstance(example, Tensor):
        raise UserError(f"engine keras: the model is called with a {type(example).__name__}; one tensor would do")
    given = tools.layers.Input(example.shape[1:], dtype=_DTYPES.get(example.dtype, tools.dtype))
    values: dict[fx.Node, Any] = {}
    weights: dict[str, Weight] = {}
    output: Any = None
    for node in _graph(model).nodes:
        if node.op == "placeholder":
            values[node] = channels_last(tools, given)
        elif node.op == "call_module":
            module = model.get_submodule(node.target)
            values[node], made = MODULES[type(module)](tools, module, values[node.args[0]])
            for weight in made:
                weights[f"{node.target}.{weight.name}" if node.target else weight.name] = weight
        elif node.op == "output":
            output = channels_first(tools, values[node.args[0]])
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda inner: values[inner])
            values[node] = FUNCTIONS[node.target](tools, *arguments[0], **arguments[1])
    converted = Converted(model=tools.keras.Model(given, output), weights=weights)
    for name, parameter in model.named_parameters():
        if name in weights:
            converted.assign(name, parameter)
    return converted


_DTYPES = {torch.int64: "int64", torch.int32: "int32"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)


def _graph(model: nn.Module) -> fx.Graph:
    if _Tracer().is_leaf_module(model, ""):
        # A model that is a single layer, under the empty name.
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("given"),)))
        return graph
    try:
        return _Tracer().trace(model)
    except Exception as error:  # whatever a forward does with what stands for a tensor
        raise UserError(
            f"engine keras: the forward of {type(model).__name__} can't be followed ({error}); "
            f"one without conditions on its tensors, of {_there()}, would do"
        ) from None


def _check_module(model: nn.Module, node: fx.Node) -> None:
    name = str(node.target)
    module = model.get_submodule(name)
    if type(module) not in MODULES:
        raise UserError(
            f"{name or 'the model'} ({type(module).__name__}) has no Keras counterpart here; there are {_there()}"
        )
    calls = sum(other.op == "call_module" and other.target == node.target for other in node.graph.nodes)
    if calls > 1 and any(True for _ in module.parameters()):
        raise UserError(f"{name} is called {calls} times in one forward, which engine keras has not; once would do")


def _check_function(model: nn.Module, node: fx.Node) -> None:
    if node.target not in FUNCTIONS:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        there = sorted({str(getattr(each, "__name__", each)) for each in FUNCTIONS})
        raise UserError(
            f"the model calls {called}, which has no Keras counterpart here; there are {', '.join(there)}"
        )


def _check_inputs(model: nn.Module, node: fx.Node) -> None:
    inputs = [other.name for other in node.graph.nodes if other.op == "placeholder"]
    if len(inputs) > 1:
        raise UserError(f"engine keras: the model is called with {', '.join(inputs)}; one tensor would do")


def _check_attribute(model: nn.Module, node: fx.Node) -> None:
    raise UserError(f"the model uses {node.target} outside of a layer, which has no Keras counterpart here")


def _check_nothing(model: nn.Module, node: fx.Node) -> None:
    pass


_CHECKS = {
    "placeholder": _check_inputs,
    "get_attr": _check_attribute,
    "call_module": _check_module,
    "call_function": _check_function,
    "call_method": _check_function,
    "output": _check_nothing,
}


def _there() -> str:
    return ", ".join(sorted(kind.__name__ for kind in MODULES))
