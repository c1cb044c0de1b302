"""The synchronous step in TensorFlow: every replica's gradients summed, then one update of each replica's copy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from samestep.data.loader import MicroBatch, StepBatch
from samestep.engines.base import Loss, OptimizerOf, StepReport, Trainer
from samestep.engines.keras.from_torch import Groups, LossOf, convert, counterpart, to_torch
from samestep.engines.keras.layers import Tools
from samestep.parallel.holdings import Holdings


class Copy:
    """A Keras model with the weights of a PyTorch model, and its optimizer state."""

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
        self._evaluate = tools.tf.function(lambda inputs: self.converted.model(inputs, training=False))

    def _zeros(self, name: str) -> list[Any]:
        """Allocate zeroed optimizer state for a weight, on the devices of its replicas."""
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
        """Divide gradient sums by `count` and clip them. Returns the norm before clipping, and the gradients.

        For use in tf.functions.
        """
        tf = self.tools.tf
        norms = [tf.cast(tf.norm(gradient), tf.float64) for gradient in gradients]
        norm = tf.norm(tf.stack(norms)) / count
        factor = 1 / count
        if clip is not None:
            factor *= tf.minimum(clip / (norm + 1e-6), tf.constant(1, tf.float64))
        return norm, [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]

    def tensor(self, value: Tensor) -> Any:
        """A PyTorch tensor as TensorFlow's."""
        return self.tools.tf.convert_to_tensor(value.detach().cpu().numpy())

    def predict(self, inputs: Tensor) -> Tensor:
        """The output in evaluation mode, on the device of the inputs."""
        return torch.from_numpy(self._evaluate(self.tensor(inputs)).numpy()).to(inputs.device)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as a tensor in PyTorch's layout."""
        for name in self._parameters:
            yield name, self._value(name)

    def state(self) -> dict[str, Tensor]:
        return {name: self._value(name) for name in self._names}

    def _value(self, name: str) -> Tensor:
        return self._others[name] if name in self._others else self.converted.parameter(name)

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter, key and values in PyTorch's layout, on the CPU."""
        for name, state in self.states.items():
            for key, variable in zip(self.groups.rule.keys, state, strict=False):
                if key in keys:
                    yield name, key, to_torch(self.converted.weights[name], variable.numpy())

    def holdings(self, copies: int = 1) -> Holdings:
        """Meta tensors with the sizes of TensorFlow's variables; it keeps no gradients between steps."""
        states = [tensor for state in self.states.values() for tensor in state]
        variables = [weight.variable for weight in self.converted.weights.values()]
        return Holdings(
            parameters=[stand_in(variable) for variable in variables for _ in range(copies)],
            gradients=[],
            optimizer_state=[stand_in(state) for state in states for _ in range(copies)],
        )

    def gradient_bytes(self) -> int:
        return sum(stand_in(variable).nbytes for variable in self.variables)


def stand_in(variable: Any) -> Tensor:
    """A meta tensor with a variable's shape and dtype."""
    dtype = getattr(torch, variable.dtype.name)
    return torch.empty(tuple(variable.shape), dtype=dtype, device="meta")


_PACK_BYTES = 25 * 2**20  # of gradients that are sent at once, so that the first leave while others are computed

# Inputs and targets [samples, ...], and the weight of each sample: 0 for one that only fills a replica up.
Feed = tuple[Any, Any, Any]


@dataclass(frozen=True, kw_only=True)
class Functions:
    """The compiled functions of a step; TensorFlow traces them once for each shape."""

    add: Callable[..., Any]  # adds a micro-batch's gradient sums to those before it
    finish: Callable[..., Any]  # computes the last micro-batch, sums over replicas, and updates


def fill_up(inputs: Tensor, targets: Tensor, *, rows: int, weight: float = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pad inputs and targets to `rows` samples. Returns them and the samples' weights, 0 for padding."""
    there = len(inputs)
    numbers = torch.zeros(rows, dtype=torch.int64, device=inputs.device)  # the padding repeats the first sample
    numbers[:there] = torch.arange(there)
    weights = torch.zeros(rows, dtype=torch.float64)
    weights[:there] = weight
    return inputs[numbers], targets[numbers], weights


class KerasTrainer(Trainer):
    """Takes steps whose gradient is the sum over the global batch / the global count.

    Collective operations of TensorFlow must be compiled in one order on every rank, so a rank fills its
    micro-batches up to the size that the largest has on any rank, with samples of weight 0. Every rank then meets
    the same shapes in the same steps.
    """

    def __init__(
        self, copy: Copy, *, schedule: LRScheduler | None, clip: float | None, ranks: int, device: torch.device
    ) -> None:
        self._copy = copy
        self._schedule = schedule
        self._clip = clip
        self._ranks = ranks
        self._device = device
        self._replicas: int = copy.strategy.num_replicas_in_sync // ranks  # of this rank
        self._steps = 0
        self._functions: dict[LossOf, Functions] = {}

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Add up the micro-batches' sums on each replica, all-reduce once, clip, update every replica.

        Each replica takes [samples / replicas] rows of a micro-batch; rows that only fill it up have weight 0.
        """
        tf = self._copy.tools.tf
        functions = self._functions_of(counterpart(loss))
        rows = self._rows(batch)
        *first, last = (self._feed(micro_batch, rows) for micro_batch in batch.micro_batches)
        sums: Sequence[Any] = ()
        for feed in first:
            sums = functions.add(feed, sums)
        self._steps += 1
        optimizer = self._copy.groups.optimizer
        numbers = [tf.constant(number, tf.float64) for number in (batch.global_samples, self._steps)]
        rates = self._copy.groups.rates()
        loss_sum, norm = functions.finish(last, sums, *numbers, tf.constant(rates, tf.float64))
        optimizer.step()  # it has no gradients; a schedule wants to see it called
        if self._schedule is not None:
            self._schedule.step()
        return StepReport(
            loss=torch.tensor(loss_sum.numpy() / batch.global_samples, dtype=torch.float64),
            grad_norm=torch.tensor(norm.numpy(), dtype=torch.float64),
            lr=rates[0],
        )

    def _rows(self, batch: StepBatch) -> int:
        """The padded size of this step's micro-batches, the same on every rank."""
        largest = -(-batch.global_samples // self._ranks)
        largest = -(-largest // len(batch.micro_batches))
        return -(-largest // self._replicas) * self._replicas

    def _feed(self, micro_batch: MicroBatch, rows: int) -> Feed:
        """Pad a micro-batch to `rows` samples, and split it over this rank's replicas."""
        filled = fill_up(*micro_batch.batch, rows=rows, weight=micro_batch.weight)
        parts = [self._copy.tensor(part) for part in filled]
        if self._replicas == 1:
            return parts[0], parts[1], parts[2]
        own_rows = rows // self._replicas

        def cut(part: Any) -> Any:
            def values_of_replica(context: Any) -> Any:
                first = context.replica_id_in_sync_group * own_rows
                return part[first : first + own_rows]

            return self._copy.strategy.experimental_distribute_values_from_function(values_of_replica)

        return cut(parts[0]), cut(parts[1]), cut(parts[2])

    def _functions_of(self, loss: LossOf) -> Functions:
        """The compiled functions of a loss, which TensorFlow traces once."""
        if loss not in self._functions:
            self._functions[loss] = self._compiled(loss)
        return self._functions[loss]

    def _compiled(self, loss: LossOf) -> Functions:
        """TensorFlow functions of one step: what a replica computes, and what all of them do together."""
        copy = self._copy
        tf, strategy = copy.tools.tf, copy.strategy
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_PACK_BYTES)

        def local(feed: Feed, sums: Sequence[Any]) -> list[Any]:
            """The loss sum and the gradients of one replica, added to `sums`."""
            inputs, targets, weights = feed
            with tf.GradientTape() as tape:
                losses = loss(tf, copy.converted.model(inputs, training=True), targets)  # [samples]
                total = tf.reduce_sum(losses * tf.cast(weights, losses.dtype))
            values = [total, *tape.gradient(total, copy.variables)]
            return [one + other for one, other in zip(sums, values, strict=True)] if sums else values

        def over_replicas(feed: Feed, sums: Sequence[Any]) -> list[Any]:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, local(feed, sums), options)

        def whole(feed: Feed, sums: Sequence[Any], count: Any) -> tuple[Any, Any, list[Any]]:
            loss_sum, *gradients = over_replicas(feed, sums)
            return loss_sum, *copy.scaled(gradients, count, self._clip)

        def finish(feed: Feed, sums: Sequence[Any], count: Any, step: Any, rates: Any) -> tuple[Any, Any]:
            with strategy.scope():
                loss_sum, norm, gradients = strategy.run(whole, args=(feed, sums, count))
                copy.update(gradients, rates, step)
                first = strategy.experimental_local_results
                return first(loss_sum)[0], first(norm)[0]

        return Functions(
            add=tf.function(lambda feed, sums: strategy.run(local, args=(feed, sums))), finish=tf.function(finish)
        )

    def predict(self, inputs: Any) -> Any:
        return self._copy.predict(inputs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.to(self._device)) for name, value in self._copy.parameters())

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, key, value.to(self._device)) for name, key, value in self._copy.optimizer_state(keys))

    def holdings(self) -> Holdings:
        return self._copy.holdings(self._replicas)

    def sent(self) -> Mapping[str, int]:
        # Of a ring's all-reduce a rank sends 2 (n - 1) / n of the message: gradients, and the loss with them.
        # What accelerators of one rank send each other is not counted.
        if self._ranks == 1:
            return {}
        message = self._copy.gradient_bytes() + self._copy.variables[0].dtype.size
        return {"all-reduce": round(2 * message * (self._ranks - 1) / self._ranks)}

    def state(self) -> dict[str, Tensor]:
        return self._copy.state()
