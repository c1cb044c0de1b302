"""DeepSpeed's pipeline: a model as the list of layers that it deals to its ranks, and the trainer on it.

Its schedule and its messages, with the loss of one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import wraps
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.data.loader import MicroBatch, Moment, StepBatch
from samestep.data.types import as_batch
from samestep.engines.base import Loss, StepReport
from samestep.engines.deepspeed import trainer
from samestep.engines.deepspeed.initialize import quietly, without_deprecations
from samestep.engines.deepspeed.trainer import DeepSpeedTrainer
from samestep.errors import UserError, index_errors_explained
from samestep.layout import Layout
from samestep.tasks.base import Task
from samestep.torch_internals.modules import AnyDropout, forward_hooks, own_children

Layers = Sequence[tuple[str, nn.Module]]  # each with its name in the model

_INSTEAD = "use engine native, which cuts any model"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A model cut into stages: this rank's layers are in `module`, other ranks' layers are on the meta device."""

    module: Any  # deepspeed.pipe.PipelineModule
    layers: Layers
    stage_of: Mapping[str, int]  # of each parameter and buffer, by its name in the model
    mine: int

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by their names in the model."""
        for name, layer in self.layers:
            for key, parameter in layer.named_parameters():
                if self.stage_of[f"{name}.{key}"] == self.mine:
                    yield f"{name}.{key}", parameter


def check_pipeline_task(task: Task, layout: Layout) -> None:
    """Raise UserError for a task whose model or inputs DeepSpeed's pipeline can't take."""
    samples = task.train_set()
    one_input(as_batch(task.collate([samples[0]])).inputs)
    with torch.random.fork_rng(devices=[]):
        check_model(task.model(), layout)


def one_input(inputs: Any) -> Tensor:
    """The single input tensor of the first layer. Raises UserError for any other kind of inputs."""
    if isinstance(inputs, tuple) and len(inputs) == 1:
        (inputs,) = inputs
    if isinstance(inputs, Tensor):
        return inputs
    raise UserError(
        f"engine deepspeed: its pipeline calls the first layer with one tensor, and a batch's inputs are a "
        f"{type(inputs).__name__}; {_INSTEAD}"
    )


def check_model(model: nn.Module, layout: Layout) -> Layers:
    """The layers of a model. Raises UserError where it is no list of layers, or has too few for the stages."""
    if not _is_sequence(model):
        raise UserError(
            f'layout "{layout}": engine deepspeed has a pipeline for models that are an nn.Sequential, whose layers '
            f"it deals to the ranks, and this one is a {type(model).__name__}; {_INSTEAD}"
        )
    layers = list(_layers(model, ""))
    _check_apart(layers)
    own = {id(parameter) for _, layer in layers for parameter in layer.parameters()}
    if more := [name for name, parameter in model.named_parameters() if id(parameter) not in own]:
        raise UserError(f"engine deepspeed: {more[0]} belongs to no layer of the nn.Sequential; {_INSTEAD}")
    trained = sum(_is_trained(layer) for _, layer in layers)
    if trained < layout.pipeline:
        few = f"use pp{trained}" if trained > 1 else "use a layout without pp"
        raise UserError(
            f'layout "{layout}": {layout.pipeline} pipeline stages for {trained} layers with parameters to train; '
            + few
        )
    return layers


def _is_sequence(module: nn.Module) -> bool:
    """Whether a module is an nn.Sequential with PyTorch's forward and without hooks."""
    plain = type(module).forward is nn.Sequential.forward
    return plain and not forward_hooks(module)


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence of sequences, one after the other, by their names in the model."""
    for name, layer in own_children(module).items():
        if layer is not None and _is_sequence(layer):
            yield from _layers(layer, f"{prefix}{name}.")
        elif layer is not None:
            yield f"{prefix}{name}", layer


def _check_apart(layers: Layers) -> None:
    """Raise UserError for a layer or tensor that stands in two places, which DeepSpeed can't synchronize."""
    first: dict[int, str] = {}
    for name, layer in layers:
        holds = [*layer.parameters(), *layer.buffers()]
        for module in [layer, *holds]:
            other = first.setdefault(id(module), name)
            if other != name and (module is not layer or not _without_state(layer)):
                raise UserError(
                    f"engine deepspeed: layers {other} and {name} are one, or share a tensor, which its pipeline "
                    f"would change apart from each other; {_INSTEAD}"
                )


def _without_state(layer: nn.Module) -> bool:
    """Whether a layer may stand in two places: one of torch.nn without children, and no dropout."""
    stateless = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, AnyDropout)
    return stateless and not any(True for _ in layer.children())


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def cut(model: nn.Module, *, package: Any, layout: Layout, mesh: Mesh, device: torch.device) -> Stages:
    """Cut the model into stages with about as many parameters each, by DeepSpeed's PipelineModule.

    Raises UserError if a stage would have no trained parameter.
    """
    layers = check_model(model, layout)
    data = "shard" if layout.shard > 1 else "replicate"
    axes = {"pipeline": "pipe", data: "data"}
    named = [name for name in layout.placement if name in axes]
    with quietly(device), redirect_stdout(StringIO()):  # it prints its stages
        backend = package.accelerator.get_accelerator().communication_backend_name()
        package.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        module = package.pipe.PipelineModule(
            layers=[layer for _, layer in layers],
            topology=package.runtime.pipe.topology.ProcessTopology(
                axes=[axes[name] for name in named], dims=[getattr(layout, name) for name in named]
            ),
            partition_method="parameters",
            # The shape goes with every message: the last micro-batch of a step has fewer samples, and so has a
            # chunk of an evaluation.
            dynamic_shape=True,
        )
    own_stage = mesh.coordinate("pipeline")
    stage_of: dict[str, int] = {}
    for stage in range(layout.pipeline):
        begin, end = module.parts[stage], module.parts[stage + 1]
        if not any(_is_trained(layer) for _, layer in layers[begin:end]):
            raise UserError(
                f'layout "{layout}": DeepSpeed cuts by the number of parameters, and leaves stage {stage} (layers '
                f"{begin} to {end - 1} of {len(layers)}) without one to train; use fewer stages"
            )
        for name, layer in layers[begin:end]:
            held = [*layer.state_dict(), *(key for key, _ in layer.named_parameters())]
            stage_of |= {f"{name}.{key}": stage for key in held}
            if stage != own_stage:
                layer.to("meta")
    for parameter in module.parameters():
        # Without this mark DeepSpeed would count only the first stage's gradients in the norm, as replicated ones.
        parameter.model_parallel = True
    return Stages(module=module, layers=layers, stage_of=stage_of, mine=own_stage)


def sendable(output: Any, stage: int) -> Any:
    """Make a stage's output contiguous for sending. Raises UserError for outputs that DeepSpeed can't send."""
    tensors = output if isinstance(output, tuple) else (output,)
    kinds = {tensor.dtype if isinstance(tensor, Tensor) else type(tensor) for tensor in tensors}
    if len(kinds) != 1 or not (isinstance(kind := kinds.pop(), torch.dtype) and kind.is_floating_point):
        raise UserError(
            f"engine deepspeed: the last layer of stage {stage} gives {_described(output)}; its pipeline hands on "
            f"one tensor of floating-point numbers, or a tuple of them of one type; {_INSTEAD}"
        )
    return tuple(tensor.contiguous() for tensor in output) if isinstance(output, tuple) else output.contiguous()


def _described(output: Any) -> str:
    """Describe a layer's output, for an error message."""
    if isinstance(output, tuple):
        return f"a tuple of {', '.join(_described(part) for part in output)}"
    return f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


@dataclass(kw_only=True)
class _Step:
    """State of the running step."""

    batch: StepBatch
    loss: Loss
    totals: Tensor  # [loss sum, count, parameters that a rank did not use]
    moments: Iterator[tuple[int, Moment]] = field(init=False)  # of this stage's forwards, numbered in their order
    lr: float = 0.0

    def __post_init__(self) -> None:
        self.moments = enumerate(micro_batch.moment for micro_batch in self.batch.micro_batches)


class PipelineTrainer(DeepSpeedTrainer):
    """One call of DeepSpeed's `train_batch` is a step, from the first forward to the optimizer."""

    def __init__(self, *, stages: Stages, **common: Any) -> None:
        super().__init__(**common)
        self._stages = stages
        self._running: _Step | None = None  # none while it evaluates
        module = self.engine.module
        module.forward = self._in_its_moment(module.forward)
        module.loss_fn = self._loss
        schedule: Any = self._package.runtime.pipe.schedule
        # DeepSpeed runs a schedule by these instructions; two are wrapped with checks and the factor for the count.
        instructions = type(self.engine)._INSTRUCTION_MAP
        self._reduce_gradients = instructions[schedule.ReduceGrads]
        self._optimizer_step = instructions[schedule.OptimizerStep]
        self.engine._INSTRUCTION_MAP = {
            **instructions,
            schedule.ReduceGrads: self._check_and_reduce,
            schedule.OptimizerStep: self._settle_and_step,
        }

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        """Let DeepSpeed run the whole step; callbacks compute the loss and the factor for the count."""
        with without_deprecations(), index_errors_explained(f"step {batch.step}", batch.samples):
            running = self._running = _Step(batch=batch, loss=loss, totals=self._begin())
            self.engine.micro_batches = len(batch.micro_batches)
            # The loss finds its targets in the micro-batch, so that stands for the labels.
            pairs = ((self._inputs(batch), batch) for batch in batch.micro_batches)
            self.engine.train_batch(pairs)
            self._running = None
            return self._report(running.totals, running.lr)

    def _inputs(self, micro_batch: MicroBatch) -> Tensor:
        return self._as_computed(one_input(micro_batch.batch.inputs))

    def _in_its_moment(self, forward: Any) -> Any:
        """Wrap the forward of this rank's layers, so that it runs in the context of its micro-batch's samples."""
        hands_on = self._stages.mine < self._layout.pipeline - 1

        @wraps(forward)
        def run(inputs: Any) -> Any:
            running = self._running
            if running is None:
                output = forward(inputs)
            else:
                number, moment = next(running.moments)
                with self._forward_context.at(moment), self._repeated.watched() if number else nullcontext():
                    output = forward(inputs)
            return sendable(output, self._stages.mine) if hands_on else output

        return run

    def _loss(self, output: Any, micro_batch: MicroBatch | None) -> Tensor:
        """The scaled loss of a micro-batch on the last stage, from which backward starts."""
        running = self._running
        if running is None or micro_batch is None:
            return torch.zeros((), device=self._device)  # predictions alone are asked for
        with self._forward_context.at(micro_batch.moment):
            term = self._term(output, micro_batch, running.loss, running.totals)
        # DeepSpeed divides by the accumulation steps of its configuration, not by this step's micro-batches.
        return term * (self._scale(running.batch) * self.engine.gradient_accumulation_steps())

    def _check_and_reduce(self, engine: Any, **keywords: Any) -> None:
        """DeepSpeed's gradient reduction, after a check that the ranks have gradients of the same parameters."""
        self._gradients.check_before_reducing()
        self._reduce_gradients(engine, **keywords)

    def _settle_and_step(self, engine: Any, **keywords: Any) -> None:
        """DeepSpeed's optimizer step, after the gradients have been multiplied by the factor for the count."""
        running = self._running
        assert running is not None
        self._settle(running.batch, running.totals)
        running.lr = engine.get_lr()[0]
        # DeepSpeed counts whole batches, and the last one may be shorter.
        engine.global_samples += running.batch.global_samples - engine.train_batch_size()
        self._optimizer_step(engine, **keywords)

    def predict(self, inputs: Any) -> Any:
        """The output of one chunk, on ranks of the last stage; DeepSpeed's evaluation would average a loss."""
        input_ = self._as_computed(one_input(inputs))
        with without_deprecations(), self._without_monitor():
            _, output = self.engine.eval_batch(
                iter([(input_, None)]), return_logits=True, reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return output

    @contextmanager
    def _without_monitor(self) -> Iterator[None]:
        """Disable DeepSpeed's monitor during predictions, for which it would log a loss that was not computed."""
        monitor = self.engine.monitor
        enabled, monitor.enabled = monitor.enabled, False
        try:
            yield
        finally:
            monitor.enabled = enabled

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, broadcast from a rank of its stage; every rank asks."""
        for name, parameter in self.model.named_parameters():
            yield name, self._from_its_stage(name, parameter)

    def optimizer_state(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        yield from ()  # each stage reads its own parameters alone

    def state(self) -> dict[str, Tensor]:
        """The whole state dict on the CPU, from the stages; every rank asks."""
        values = self.model.state_dict(keep_vars=True)
        return {name: self._from_its_stage(name, value).cpu().clone() for name, value in values.items()}

    def _from_its_stage(self, name: str, value: Tensor) -> Tensor:
        """A parameter in float32, or a buffer, on every rank of the pipeline."""
        stage = self._stages.stage_of[name]
        dtype = self._whole_dtype if isinstance(value, nn.Parameter) else value.dtype
        if stage == self._stages.mine:
            with without_deprecations():
                whole = trainer.whole(value, self._package, dtype).contiguous()
        else:
            whole = torch.empty(value.shape, dtype=dtype, device=self._device)
        dist.broadcast(whole, src=self._mesh.ranks("pipeline")[stage], group=self._mesh.group("pipeline"))
        return whole
