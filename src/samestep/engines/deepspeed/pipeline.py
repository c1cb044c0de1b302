"""A model as the list of layers that DeepSpeed's pipeline deals to its ranks, and which models are no such list."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.engines.deepspeed.start import quietly
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.tasks.base import Task, as_batch

Layers = Sequence[tuple[str, nn.Module]]  # each with its name in the model

_INSTEAD = "engine native would do, which cuts any model"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A model whose layers are on several ranks. This one's are in `module`; the others' are on the meta device."""

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


def check_task(task: Task, layout: Layout) -> None:
    """Raise UserError for a task whose model or inputs DeepSpeed's pipeline can't take."""
    samples = task.train_set()
    one_input(as_batch(task.collate([samples[0]])).inputs)
    with torch.random.fork_rng(devices=[]):
        check_model(task.model(), layout)


def one_input(inputs: Any) -> Tensor:
    """The one tensor that the first layer is called with. Raises UserError where it is called with anything else."""
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
        few = f"pp{trained} would do" if trained > 1 else "a layout without pp would do"
        raise UserError(
            f'layout "{layout}": {layout.pipeline} pipeline stages for {trained} layers with parameters to train; '
            + few
        )
    return layers


def _is_sequence(module: nn.Module) -> bool:
    """Whether a module's forward is that of its parts one after the other, and nothing else."""
    plain = type(module).forward is nn.Sequential.forward
    return plain and not module._forward_hooks and not module._forward_pre_hooks


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module._modules.items():
        if layer is not None and _is_sequence(layer):
            yield from _layers(layer, f"{prefix}{name}.")
        elif layer is not None:
            yield f"{prefix}{name}", layer


def _check_apart(layers: Layers) -> None:
    """Refuse what would be in two stages: DeepSpeed has no message for it."""
    first: dict[int, str] = {}
    for name, layer in layers:
        holds = [*layer.parameters(), *layer.buffers()]
        for each in [layer, *holds]:
            other = first.setdefault(id(each), name)
            if other != name and (each is not layer or not _without_state(layer)):
                raise UserError(
                    f"engine deepspeed: layers {other} and {name} are one, or share a tensor, which its pipeline "
                    f"would change apart from each other; {_INSTEAD}"
                )


def _without_state(layer: nn.Module) -> bool:
    """Whether a layer may stand in two places: it holds nothing, and its dropout does not count its calls."""
    known = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, nn.modules.dropout._DropoutNd)
    return known and not any(True for _ in layer.children())


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def cut(model: nn.Module, *, package: Any, layout: Layout, mesh: Mesh, device: torch.device) -> Stages:
    """Deal the layers to the pipeline ranks, as many trained parameters to each as can be.

    Raises UserError where a stage would have none.
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
    mine = mesh.coordinate("pipeline")
    stage_of: dict[str, int] = {}
    for stage in range(layout.pipeline):
        begin, end = module.parts[stage], module.parts[stage + 1]
        if not any(_is_trained(layer) for _, layer in layers[begin:end]):
            raise UserError(
                f'layout "{layout}": DeepSpeed cuts by the number of parameters, and leaves stage {stage} (layers '
                f"{begin} to {end - 1} of {len(layers)}) without one to train; fewer stages would do"
            )
        for name, layer in layers[begin:end]:
            held = [*layer.state_dict(), *(key for key, _ in layer.named_parameters())]
            stage_of |= {f"{name}.{key}": stage for key in held}
            if stage != mine:
                layer.to("meta")
    for parameter in module.parameters():
        # Else DeepSpeed counts only those of the first stage in the gradient's norm, as if all stages had the same.
        parameter.model_parallel = True
    return Stages(module=module, layers=layers, stage_of=stage_of, mine=mine)


def sendable(output: Any, stage: int) -> Any:
    """What a stage hands on, as messages can take it. Raises UserError for what DeepSpeed's messages don't have."""
    tensors = output if isinstance(output, tuple) else (output,)
    kinds = {each.dtype if isinstance(each, Tensor) else type(each) for each in tensors}
    if len(kinds) != 1 or not (isinstance(kind := kinds.pop(), torch.dtype) and kind.is_floating_point):
        raise UserError(
            f"engine deepspeed: the last layer of stage {stage} gives {_described(output)}; its pipeline hands on "
            f"one tensor of floating-point numbers, or a tuple of them of one type; {_INSTEAD}"
        )
    return tuple(each.contiguous() for each in output) if isinstance(output, tuple) else output.contiguous()


def _described(output: Any) -> str:
    if isinstance(output, tuple):
        return f"a tuple of {', '.join(_described(each) for each in output)}"
    return f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
