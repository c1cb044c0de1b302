"""From PyTorch to Keras: a model with the same weights, by what its forward calls; losses and update rules.

The counterpart of each module and function stands in layers.py. The model is converted because a task that gave a
Keras model of its own would define it twice, and nothing would hold the second definition equal to the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from samestep.engines.base import Loss, OptimizerOf
from samestep.engines.keras.layers import FUNCTIONS, MODULES, Tools, Weight, channels_first, channels_last
from samestep.errors import UserError
from samestep.tasks.image_classification import ImageClassification
from samestep.tasks.losses import TaskLoss
from samestep.tasks.regression import Regression

# (TensorFlow, output, targets) -> each sample's term of the loss sum: [samples].
LossOf = Callable[[Any, Any, Any], Any]


def _squared_error(tf: Any, output: Any, targets: Any) -> Any:
    """The sum over each sample's squared differences: [samples]."""
    squares = tf.math.squared_difference(output, targets)  # [samples, ...]
    return tf.reduce_sum(tf.reshape(squares, [tf.shape(squares)[0], -1]), axis=1)


def _cross_entropy(tf: Any, output: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=output)


# By the function of a task that it stands for. All of them count samples.
_LOSSES: Mapping[Any, LossOf] = {
    ImageClassification.loss: _cross_entropy,
    Regression.loss: _squared_error,
}


def counterpart(loss: Loss) -> LossOf:
    """The TensorFlow counterpart of a task's loss. Raises UserError if there is none."""
    loss = loss.function if isinstance(loss, TaskLoss) else loss
    function = getattr(loss, "__func__", loss)  # also of a class that inherits it
    if function not in _LOSSES:
        owner = type(getattr(loss, "__self__", loss)).__name__
        there = ", ".join(sorted(loss.__qualname__.partition(".")[0] for loss in _LOSSES))
        raise UserError(
            f"the loss of {owner} has no TensorFlow counterpart; use a task that inherits the loss of one of these: "
            f"{there}; or engine native"
        )
    return _LOSSES[function]


Settings = Mapping[str, Any]  # a PyTorch optimizer's group: betas, eps, momentum, ...

# (TensorFlow, variable, gradient, state, learning rate, which step from 1, settings); float64 where they are numbers.
Apply = Callable[[Any, Any, Any, Sequence[Any], Any, Any, Settings], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update rule of an optimizer, and the number of state tensors that it keeps for each parameter."""

    state: Callable[[Settings], int]
    apply: Apply
    keys: Sequence[str]  # what PyTorch's optimizer calls these tensors


def _adamw(
    tf: Any, variable: Any, gradient: Any, state: Sequence[Any], rate: Any, step: Any, settings: Settings
) -> None:
    """Loshchilov & Hutter 2019, algorithm 2."""
    first, second = state
    beta_1, beta_2 = settings["betas"]
    dtype = variable.dtype
    variable.assign(variable * tf.cast(1 - rate * settings["weight_decay"], dtype))
    mean = first.assign(first + (gradient - first) * (1 - beta_1))
    square = second.assign(second * beta_2 + tf.square(gradient) * (1 - beta_2))
    correction_1, correction_2 = (1 - tf.pow(tf.constant(beta, tf.float64), step) for beta in (beta_1, beta_2))
    deviation = tf.sqrt(square) / tf.cast(tf.sqrt(correction_2), dtype) + settings["eps"]
    variable.assign_sub(mean / deviation * tf.cast(rate / correction_1, dtype))


def _sgd(
    tf: Any, variable: Any, gradient: Any, state: Sequence[Any], rate: Any, step: Any, settings: Settings
) -> None:
    """Sutskever et al. 2013, with PyTorch's order: decay into the gradient, the rate outside of the momentum."""
    if settings["weight_decay"]:
        gradient = gradient + variable * settings["weight_decay"]
    if state:
        (buffer,) = state
        moving = buffer.assign(buffer * settings["momentum"] + gradient)
        gradient = gradient + moving * settings["momentum"] if settings["nesterov"] else moving
    variable.assign_sub(gradient * tf.cast(rate, variable.dtype))


RULES: Mapping[type[Optimizer], Rule] = {
    torch.optim.AdamW: Rule(state=lambda settings: 2, apply=_adamw, keys=("exp_avg", "exp_avg_sq")),
    torch.optim.SGD: Rule(
        state=lambda settings: 1 if settings["momentum"] else 0, apply=_sgd, keys=("momentum_buffer",)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A PyTorch optimizer of meta tensors, whose groups hold the settings of each parameter's update rule."""

    optimizer: Optimizer
    rule: Rule
    group_of: Mapping[str, int]  # by the name of each parameter that is trained

    @classmethod
    def of(cls, model: nn.Module, optimizer_of: OptimizerOf) -> "Groups":
        """Make the optimizer of a model's parameters, with meta tensors in place of them."""
        empty = {
            name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        optimizer = optimizer_of(iter(empty.items()))
        if type(optimizer) not in RULES:
            there = ", ".join(sorted(kind.__name__ for kind in RULES))
            raise UserError(f"engine keras: no {type(optimizer).__name__} in TensorFlow here; there are {there}")
        names = {id(parameter): name for name, parameter in empty.items()}
        group_of = {
            names[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        return cls(optimizer=optimizer, rule=RULES[type(optimizer)], group_of=group_of)

    def settings(self, name: str) -> Settings:
        return self.optimizer.param_groups[self.group_of[name]]

    def states(self, name: str) -> int:
        """The number of state tensors of a parameter; 0 if it is not trained."""
        return self.rule.state(self.settings(name)) if name in self.group_of else 0

    def rates(self) -> list[float]:
        """The learning rate of each group in the step to come."""
        return [group["lr"] for group in self.optimizer.param_groups]


@dataclass(frozen=True, kw_only=True)
class ConvertedModel:
    """A Keras model, and the variable in it for each parameter of the PyTorch model."""

    model: Any  # takes and gives tensors with the dimensions in PyTorch's order
    weights: Mapping[str, Weight]  # by the parameter's name

    def parameter(self, name: str) -> Tensor:
        """The value of a parameter in PyTorch's layout, on the CPU."""
        return to_torch(self.weights[name], self.weights[name].variable.numpy())

    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter to a value in PyTorch's layout."""
        self.weights[name].variable.assign(to_keras(self.weights[name], value))


def to_torch(weight: Weight, value: Any) -> Tensor:
    """A variable's value, an array, as the parameter that it stands for."""
    tensor = torch.from_numpy(value)
    if weight.axes is None:
        return tensor
    back = [weight.axes.index(axis) for axis in range(len(weight.axes))]
    return tensor.permute(back).contiguous()


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
                    f"{owners[id(parameter)]} and {name} are one tied parameter, which engine keras has not; use "
                    "engine native"
                )
            owners[id(parameter)] = name


def convert(model: nn.Module, tools: Tools, example: Any) -> ConvertedModel:
    """Make the Keras model in the strategy's scope that is entered. `example`: what the model may be called with."""
    check(model)
    if not isinstance(example, Tensor):
        raise UserError(f"engine keras: the model is called with a {type(example).__name__}; use one tensor")
    input_ = tools.layers.Input(example.shape[1:], dtype=_DTYPES.get(example.dtype, tools.dtype))
    values: dict[fx.Node, Any] = {}
    weights: dict[str, Weight] = {}
    output: Any = None
    for node in _graph(model).nodes:
        if node.op == "placeholder":
            values[node] = channels_last(tools, input_)
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
    converted = ConvertedModel(model=tools.keras.Model(input_, output), weights=weights)
    for name, parameter in model.named_parameters():
        if name in weights:
            converted.assign(name, parameter)
    return converted


_DTYPES = {torch.int64: "int64", torch.int32: "int32"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)


def _graph(model: nn.Module) -> fx.Graph:
    """The model's forward as a graph of calls. Raises UserError for a forward that decides by values."""
    if _Tracer().is_leaf_module(model, ""):
        # A model that is a single layer, under the empty name.
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("given"),)))
        return graph
    try:
        return _Tracer().trace(model)
    except Exception as error:  # whatever a forward does with what stands for a tensor
        raise UserError(
            f"engine keras: the forward of {type(model).__name__} can't be followed ({error}); use "
            f"one without conditions on its tensors, of {_there()}"
        ) from None


def _check_module(model: nn.Module, node: fx.Node) -> None:
    """Raise UserError for a module without a counterpart, or one with weights that is called twice."""
    name = str(node.target)
    module = model.get_submodule(name)
    if type(module) not in MODULES:
        raise UserError(
            f"{name or 'the model'} ({type(module).__name__}) has no Keras counterpart here; there are {_there()}"
        )
    calls = sum(other.op == "call_module" and other.target == node.target for other in node.graph.nodes)
    if calls > 1 and any(True for _ in module.parameters()):
        raise UserError(f"{name} is called {calls} times in one forward, which engine keras has not; call it once")


def _check_function(model: nn.Module, node: fx.Node) -> None:
    """Raise UserError for a function without a counterpart."""
    if node.target not in FUNCTIONS:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        there = sorted({str(getattr(function_, "__name__", function_)) for function_ in FUNCTIONS})
        raise UserError(
            f"the model calls {called}, which has no Keras counterpart here; there are {', '.join(there)}"
        )


def _check_inputs(model: nn.Module, node: fx.Node) -> None:
    """Raise UserError for a model of several inputs."""
    inputs = [other.name for other in node.graph.nodes if other.op == "placeholder"]
    if len(inputs) > 1:
        raise UserError(f"engine keras: the model is called with {', '.join(inputs)}; use one tensor")


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
