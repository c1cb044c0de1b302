"""TensorFlow's ParameterServerStrategy: workers change the servers' parameters without waiting for each other."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from samestep import environment
from samestep.data.loader import StepBatch
from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Loss, Preparation, StepReport, Trainer
from samestep.engines.keras import engine, from_torch
from samestep.engines.keras.engine import PACKAGES, check_loop, start
from samestep.engines.keras.trainer import Copy, fill_up, stand_in
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.holdings import Holdings
from samestep.tasks.base import Task

CHIEF, WORKER, SERVER = "chief", "worker", "ps"  # as TensorFlow calls them
_FEWEST = 3  # one of each


def roles(ranks: int) -> list[str]:
    """The role of each rank: rank 0 is the chief, then come workers, and the last third of the others are servers."""
    servers = max(1, (ranks - 1) // 3)
    return [CHIEF, *[WORKER] * (ranks - 1 - servers), *[SERVER] * servers]


class KerasParameterServer(Engine):
    """The servers hold parameters and optimizer state, the workers compute, and the chief hands out samples.

    A step's batch is cut into parts, a worker's share or a micro-batch each. Whichever worker is free takes the
    next part, reads the parameters as they are, and the servers apply its gradient when it comes: the mean over
    the part's samples, clipped, with the part's share of the learning rate. It may be as many updates old as
    there are other workers. A step is over when all of its parts are applied.
    """

    name = "keras-parameter-server"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words(
            "TensorFlow's `ParameterServerStrategy`, asynchronous", "TensorFlow 的 `ParameterServerStrategy`，异步"
        ),
        axes=frozenset({"replicate"}),
        precisions=frozenset({"fp64", "fp32"}),
        packages=PACKAGES,
        same_step=False,
        float32_matmul=False,
    )

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        if layout.size < _FEWEST:
            raise LayoutError(
                f'layout "{layout}": engine "{self.name}" wants a chief, a worker and a server at least; '
                f"use dp{_FEWEST} or more"
            )
        from_torch.counterpart(task.loss)
        from_torch.check(task.model())

    def prepare(self, model: nn.Module, how: Preparation) -> "ParameterServerTrainer":
        check_loop(self.name, how.options)
        tools = start(how.options.precision, how.device)
        strategy = _join(tools.tf)
        common: dict[str, Any] = {"tools": tools, "optimizer_of": how.optimizer_of}
        alone = tools.tf.distribute.get_strategy()
        here = Copy(model, how.details.example, strategy=alone, trains=False, **common)
        there = Copy(model, how.details.example, strategy=strategy, **common) if strategy is not None else None
        return ParameterServerTrainer(
            here,
            there,
            schedule=how.schedule_of(here.groups.optimizer),
            clip=how.options.clip,
            roles=roles(how.layout.size),
            micro_batch=how.options.micro_batch,
            device=how.device,
        )


@cache  # TensorFlow lets a process join one cluster, before it has done anything else
def _join(tf: Any) -> Any:
    """Become what this rank is: the strategy for the chief; for others a server in threads, and None."""
    task = engine.agree(roles(dist.get_world_size()))
    with environment.tensorflow_settings(task.to_json()):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        if task.kind != CHIEF:
            _serve(tf, resolver)
        dist.barrier()
        return tf.distribute.ParameterServerStrategy(resolver) if task.kind == CHIEF else None


@cache
def _serve(tf: Any, resolver: Any) -> Any:
    return tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    )


class ParameterServerTrainer(Trainer):
    """The chief's trainer; on other ranks, its counterpart, while TensorFlow's worker or server runs in threads.

    Every rank has its own copy of the model for predictions, which is refreshed from the servers when it is needed
    and the parameters have changed.
    """

    def __init__(
        self,
        here: Copy,
        there: Copy | None,
        *,
        schedule: LRScheduler | None,
        clip: float | None,
        roles: list[str],
        micro_batch: int | None,
        device: torch.device,
    ) -> None:
        self._here = here
        self._there = there  # on the chief: the model whose variables are on the servers
        self._schedule = schedule
        self._clip = clip
        self._roles = roles
        self._micro_batch = micro_batch
        self._device = device
        self._updates = 0
        self._changed = False
        self._handed_out = 0  # bytes of samples in the last step, by the chief
        self._sent = 0
        self._served = self._places()
        self._functions: dict[from_torch.LossOf, Callable[..., Any]] = {}
        self._coordinator: Any = None
        if there is not None:
            tf = there.tools.tf
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(there.strategy)

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        rates = self._here.groups.rates()
        own_batches = [batch.batch for batch in batch.micro_batches if not batch.moment.zero_weight]
        ranks: list[Any] | None = [None] * len(self._roles) if self._there is not None else None
        dist.gather_object(own_batches, ranks)
        sums = torch.zeros(2, dtype=torch.float64)  # loss sum, and the norms of the parts' gradients
        rows = self._rows(batch)
        parts = -(-batch.global_samples // rows)
        if self._there is not None:
            assert ranks is not None
            batches = [batch for micro_batches in ranks for batch in micro_batches]
            inputs, targets = (torch.cat([batch_[place] for batch_ in batches]) for place in range(2))
            sums = self._hand_out(
                inputs.split(rows), targets.split(rows), self._function(from_torch.counterpart(loss))
            )
        dist.broadcast(sums, src=0)
        self._updates += parts
        self._sent = self._bytes_sent(parts)
        self._changed = True
        self._here.groups.optimizer.step()  # it has no gradients; a schedule wants to see it called
        if self._schedule is not None:
            self._schedule.step()
        return StepReport(loss=sums[0] / batch.global_samples, grad_norm=sums[1] / parts, lr=rates[0])

    def _rows(self, batch: StepBatch) -> int:
        """Samples of a part of the batch."""
        share = -(-batch.global_samples // self._roles.count(WORKER))
        return min(self._micro_batch or share, share)

    def _hand_out(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], update: Callable[..., Any]
    ) -> Tensor:
        """Schedule a step's parts on the workers, and wait for all of them. Returns [loss sum, sum of norms]."""
        tf, copy = self._here.tools.tf, self._here
        total, rows = sum(len(part) for part in inputs), max(len(part) for part in inputs)
        rates = tf.constant(copy.groups.rates(), tf.float64)
        results = []
        self._handed_out = 0
        for number, (part_inputs, part_targets) in enumerate(zip(inputs, targets, strict=True)):
            feed = fill_up(part_inputs, part_targets, rows=rows)  # one shape, which is compiled once
            self._handed_out += sum(part.nbytes for part in feed)
            step = tf.constant(self._updates + number + 1, tf.float64)
            share = len(part_inputs) / total
            arguments = (*(copy.tensor(part) for part in feed), step, rates * share)
            results.append(self._coordinator.schedule(update, args=arguments))
        self._coordinator.join()
        return torch.tensor([result.fetch() for result in results], dtype=torch.float64).sum(dim=0)

    def _function(self, loss: from_torch.LossOf) -> Callable[..., Any]:
        if loss not in self._functions:
            assert self._there is not None
            self._functions[loss] = self._compiled(self._there, loss)
        return self._functions[loss]

    def _compiled(self, copy: Copy, loss: from_torch.LossOf) -> Callable[..., Any]:
        """Compile a worker's function for a part: read the parameters, compute, apply the gradient on the servers."""
        tf = copy.tools.tf

        def compute(inputs: Any, targets: Any, weights: Any) -> tuple[Any, Any, list[Any]]:
            with tf.GradientTape() as tape:
                losses = loss(tf, copy.converted.model(inputs, training=True), targets)  # [samples]
                total = tf.reduce_sum(losses * tf.cast(weights, losses.dtype))
            gradients = tape.gradient(total, copy.variables)
            return total, *copy.scaled(gradients, tf.reduce_sum(weights), self._clip)

        def update(inputs: Any, targets: Any, weights: Any, step: Any, rates: Any) -> tuple[Any, Any]:
            total, norm, gradients = copy.strategy.run(compute, args=(inputs, targets, weights))
            copy.update(gradients, rates, step)
            return tf.cast(total, tf.float64), norm

        return tf.function(update)

    def _bytes_sent(self, parts: int) -> int:
        """Bytes that this rank sends in a step of `parts` parts, averaged over the ranks of its role."""
        kind = self._roles[dist.get_rank()]
        if kind == CHIEF:
            return self._handed_out
        # A worker sends a gradient for a part, and the servers send it the parameters before.
        return round(parts * self._here.gradient_bytes() / self._roles.count(kind))

    def _refresh(self) -> None:
        """Broadcast the servers' parameters to every rank; every rank must ask."""
        if not self._changed:
            return
        for name in self._here.converted.weights:
            source = self._there or self._here
            value = source.converted.parameter(name)
            dist.broadcast(value, src=0)
            self._here.converted.assign(name, value)
        self._changed = False

    def predict(self, inputs: Any) -> Any:
        self._refresh()
        return self._here.predict(inputs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self._refresh()
        return ((name, value.to(self._device)) for name, value in self._here.parameters())

    def _places(self) -> Mapping[str, int]:
        """On which server each parameter is; every rank must ask."""
        places: list[Any] = [None]
        if self._there is not None:
            tf = self._there.tools.tf
            weights = self._there.converted.weights
            devices = {name: tf.DeviceSpec.from_string(weight.variable.device) for name, weight in weights.items()}
            places = [{name: device.task for name, device in devices.items()}]
        dist.broadcast_object_list(places)
        return places[0]

    def holdings(self) -> Holdings:
        """The copy that every rank predicts with; on a server also the parameters that it serves, and their state."""
        here, rank = self._here.holdings(), dist.get_rank()
        if self._roles[rank] != SERVER:
            return here
        number = self._roles[:rank].count(SERVER)
        served, states = [], []
        for name in (name for name, place in self._served.items() if place == number):
            parameter = stand_in(self._here.converted.weights[name].variable)
            served.append(parameter)
            states += [parameter] * self._here.groups.states(name)
        return Holdings(parameters=[*here.parameters, *served], gradients=[], optimizer_state=states)

    def sent(self) -> Mapping[str, int]:
        return {"point-to-point": self._sent}

    def state(self) -> dict[str, Tensor]:
        self._refresh()
        return self._here.state()
