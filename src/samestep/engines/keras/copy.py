"""A task's model in Keras under a strategy: its variables, the optimizer's state, and both in PyTorch's layout."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engines.base import OptimizerOf
from samestep.engines.keras.convert import convert
from samestep.engines.keras.layers import Tools
from samestep.engines.keras.optimizers import Groups
from samestep.parallel.holdings import Holdings


class Copy:
    """A Keras model with the weights of a PyTorch model, and the state with which its optimizer steps."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        tools: Tools,
        strategy: Any,
        optimizer_of: OptimizerOf,
        trains: bool = True,
    ) -> None:
        self.tools = tools
        self.strategy = strategy
        self.groups = Groups.of(model, optimizer_of)
        with strategy.scope():
            self.converted = convert(model, tools, example)
            weights = self.converted.weights
            self.trained = [name for name in weights if name in self.groups.group_of]
            self.variables = [weights[name].variable for name in self.trained]
            self.states = {name: self._zeros(name) for name in self.trained} if trains else {}
        self._parameters = [name for name, _ in model.named_parameters()]
        # What the Keras model has not: buffers, and parameters that the forward does not use.
        self._others = {
            name: value.detach().cpu().clone() for name, value in model.state_dict().items() if name not in weights
        }
        self._names = list(model.state_dict())
        self._evaluate = tools.tf.function(lambda given: self.converted.model(given, training=False))

    def _zeros(self, name: str) -> list[Any]:
        tf, variable = self.tools.tf, self.converted.weights[name].variable
        with self.strategy.extended.colocate_vars_with(variable):
            return [
                tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for _ in range(self.groups.states(name))
            ]

    def update(self, gradients: list[Any], rates: Any, step: Any) -> None:
        """Step the optimizer; `rates` [groups] and `step`, counted from 1, are in float64. For tf.functions."""
        groups = self.groups
        for name, variable, gradient in zip(self.trained, self.variables, gradients, strict=True):
            rate = rates[groups.group_of[name]]
            self.strategy.extended.update(
                variable,
                lambda variable, gradient, rate, step, *state, name=name: groups.rule.apply(
                    self.tools.tf, variable, gradient, state, rate, step, groups.settings(name)
                ),
                args=(gradient, rate, step, *self.states[name]),
            )

    def scaled(self, gradients: list[Any], count: Any, clip: float | None) -> tuple[Any, list[Any]]:
        """Of gradients' sums over `count` terms the mean's norm, and the mean, clipped. For tf.functions."""
        tf = self.tools.tf
        norms = [tf.cast(tf.norm(each), tf.float64) for each in gradients]
        norm = tf.norm(tf.stack(norms)) / count
        factor = 1 / count
        if clip is not None:
            factor *= tf.minimum(clip / (norm + 1e-6), tf.constant(1, tf.float64))
        return norm, [each * tf.cast(factor, each.dtype) for each in gradients]

    def tensor(self, value: Tensor) -> Any:
        """A PyTorch tensor as TensorFlow's."""
        return self.tools.tf.convert_to_tensor(value.detach().cpu().numpy())

    def predict(self, inputs: Tensor) -> Tensor:
        """The output in evaluation mode, on the device of the inputs."""
        return torch.from_numpy(self._evaluate(self.tensor(inputs)).numpy()).to(inputs.device)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._parameters:
            yield name, self._value(name)

    def state(self) -> dict[str, Tensor]:
        return {name: self._value(name) for name in self._names}

    def _value(self, name: str) -> Tensor:
        return self._others[name] if name in self._others else self.converted.parameter(name)

    def holdings(self, copies: int = 1) -> Holdings:
        """Stand-ins for what TensorFlow holds, of as many bytes; it keeps no gradient from step to step."""
        states = [each for state in self.states.values() for each in state]
        variables = [weight.variable for weight in self.converted.weights.values()]
        return Holdings(
            parameters=[stand_in(each) for each in variables for _ in range(copies)],
            gradients=[],
            optimizer_state=[stand_in(each) for each in states for _ in range(copies)],
        )

    def gradient_bytes(self) -> int:
        return sum(stand_in(each).nbytes for each in self.variables)


def stand_in(variable: Any) -> Tensor:
    """A tensor of a variable's bytes, without memory."""
    dtype = getattr(torch, variable.dtype.name)
    return torch.empty(tuple(variable.shape), dtype=dtype, device="meta")
