"""Stage: a rank's part of a pipeline-parallel model, and how the model's own forward runs one stage.

Placeholder modules, without parameters or computation, stand in a rank's model for modules of other stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh, new_group
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.calls import Trace
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.pipeline.blanks import (
    BlankOutput,
    blank,
    blank_parameters,
    own_hooks,
    placeholder_module,
    stand_in,
)
from samestep.parallel.pipeline.partition import PartitionPlan, Stages, make_plan
from samestep.parallel.pipeline.schedule import owners
from samestep.parallel.pipeline.stage_run import StageDone, StageRun
from samestep.parallel.pipeline.units import units_of
from samestep.parallel.sharding import ShardTable
from samestep.tasks.base import call
from samestep.torch_internals.modules import own_children, own_parameters


class StagedModel(nn.Module):
    """A model of which this rank holds some stages; a forward runs one of them.

    For any stage, the model's own forward runs on the micro-batch's inputs, with every unit replaced by a stand-in
    that asks the running stage what to do: compute, or return received tensors and blanks for the rest.

    Why the model's own forward: the code between layers (masks, reshapes, loops over lists) is user code that can't
    be partitioned. So each stage runs all of it, with blanks (expanded scalars without memory, `blanks.blank`) for
    outputs of other stages. Units of other stages compute nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        unsliced: nn.Module,
        plan: PartitionPlan,
        own_stages: Sequence[int],
        device: torch.device,
        trace: Trace,
        forward_context: ForwardContext,
    ) -> None:
        """`unsliced`: the model without numbers, as it was before any of it was sliced."""
        super().__init__()
        self.model = model
        self._unsliced = [unsliced]  # in a list, since it is no module of this one
        self.plan = plan
        self.mine = own_stages
        self._device = device
        self._forward_context = forward_context
        self._run: StageRun | None = None
        self._backward_of: int | None = None  # the stage whose backward runs
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        units = units_of(model, trace, [block.name for block in plan.blocks])
        names = {id(module): name for name, module in model.named_modules()}
        layers = dict.fromkeys(block.name for block in plan.blocks if plan.stages_of(block.name) & set(own_stages))
        self.blocks: list[nn.Module] = [model.get_submodule(name) for name in layers]
        blanks = {id(module): blank_parameters(module, device) for module in model.modules() if _has_any(module)}
        self._drop_parameters(units)
        standing: dict[str, nn.Module] = {}
        for name, unit in units.items():
            self._place(name, names[id(unit)], unit, standing)
        # Modules that hold units only, all of other ranks; those have their own.
        self._emptied = [
            (module, blanks[id(module)])
            for module in model.modules()
            if id(module) in blanks and not _has_any(module)
        ]

    def _place(self, name: str, unit_name: str, unit: nn.Module, standing: dict[str, nn.Module]) -> None:
        """Make a stand-in for a unit, and replace the unit by a placeholder if no stage of this rank needs it."""
        parent_name, _, key = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        held = bool(self.plan.modules[name] & set(self.mine))
        # A module that stands in several places is one unit, and one stand-in counts its calls.
        if unit_name not in standing:
            forward = self._forward_of(unit_name, unit, standing, held=held)
            standing[unit_name] = stand_in(unit, self._device, forward, held=held)
        self._places.append((parent, key, standing[unit_name]))
        if not held:
            own_children(parent)[key] = placeholder_module(unit, self._device)

    def _forward_of(
        self, name: str, unit: nn.Module, standing: Mapping[str, nn.Module], *, held: bool
    ) -> Callable[..., Any]:
        """Make the forward of a unit's stand-in (in `standing`), which passes the call to the running stage."""
        elsewhere = not self.plan.stages_of(name) <= set(self.mine)
        call = next((call.call for call in self.plan.calls if call.unit == name), None)
        several = len(self.mine) > 1
        # The unsliced module, as the code of a sliced one gives other shapes.
        imagined = self._unsliced[0].get_submodule(name) if call is not None and (elsewhere or several) else None
        module = unit if held else None
        blanks = None if call is None or imagined is None else BlankOutput(imagined, call, self._device)

        call_hooks = own_hooks(unit)

        def forward(*arguments: Any, **keywords: Any) -> Any:
            if self._run is None:
                return self._recomputed(name, module)(*arguments, **keywords)
            hooks = partial(call_hooks, standing[name])
            return self._run.call(name, module, blanks, hooks, arguments, keywords)

        return forward

    def _recomputed(self, name: str, module: nn.Module | None) -> nn.Module:
        """The unit of a stand-in that the model's own checkpointing calls in a backward.

        Raises LayoutError for one of another stage: what that stage computed is not there any more.
        """
        if module is not None and self.plan.stages_of(name) == {self._backward_of}:
            return module
        failure = LayoutError(
            f"the model's own checkpointing computes {name} again together with layers of another pipeline stage "
            "than its own; use recompute=full in place of it, or a checkpoint around each layer alone"
        )
        failure.on_every_rank = False
        raise failure

    @contextmanager
    def in_backward_of(self, stage: int) -> Iterator[None]:
        """Context of a backward of a stage, in which the model's own checkpointing may call its units again."""
        self._backward_of = stage
        try:
            with self._standing_in(None):
                yield
        finally:
            self._backward_of = None

    def _drop_parameters(self, units: Mapping[str, nn.Module]) -> None:
        """Replace parameters of modules that contain units by blanks, if no stage of this rank needs them."""
        inside = {id(p) for unit in units.values() for p in unit.parameters()}
        for module_name, module in self.model.named_modules():
            for key, parameter in list(own_parameters(module).items()):
                name = f"{module_name}.{key}" if module_name else key
                if parameter is None or id(parameter) in inside or self.plan.parameters[name] & set(self.mine):
                    continue
                del own_parameters(module)[key]
                vars(module)[key] = blank(parameter.shape, parameter.dtype, self._device)

    def forward(self, stage: int, inputs: Any, received: Sequence[Tensor]) -> Any:
        """Run a stage. Returns the tensors that it passes on, in the plan's order; for the last the model's output.

        `received`: the tensors of earlier stages that it uses (`PartitionPlan.used`, sorted).
        """
        run = StageRun(
            self.plan, stage, dict(zip(self.plan.taken(stage), received, strict=True)), self._forward_context
        )
        with self._standing_in(run):
            try:
                output = call(self.model, inputs)
            except StageDone:
                return run.handed_on()
        if stage < self.plan.stages - 1:
            raise run.never_ended()
        return output

    @contextmanager
    def _standing_in(self, run: StageRun | None) -> Iterator[None]:
        """Context in which the model has stand-ins; between runs and backwards it has its own modules."""
        before = [(parent, key, own_children(parent)[key]) for parent, key, _ in self._places]
        for parent, key, module in self._places:
            own_children(parent)[key] = module
        for module, parameters in self._emptied:
            vars(module)["parameters"] = parameters
        self._run = run
        try:
            yield
        finally:
            self._run = None
            for module, _ in self._emptied:
                vars(module).pop("parameters", None)
            for parent, key, module in before:
                own_children(parent)[key] = module

    def weights_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage of this rank uses."""
        needed = {name for name, stages in self.plan.computed_with.items() if stage in stages}
        return [p for name, p in self.model.named_parameters() if name in needed and p.requires_grad]


def cut(
    model: nn.Module,
    unsliced: nn.Module,
    layout: Layout,
    mesh: Mesh,
    trace: Trace,
    parts: ShardTable,
    cut_at: Sequence[str],
    device: torch.device,
    forward_context: ForwardContext,
) -> StagedModel:
    """Reduce a model to this rank's stages, and record in `parts` which stages hold which parameters.

    Only the shapes of parameters are used, so they may be on the meta device. Stages run on `device`. `unsliced`: a
    copy of the model without values, made before slicing.

    Raises LayoutError if the model can't be cut into the layout's stages.
    """
    plan = make_plan(model, layout, trace, cut_at)
    rank_of = owners(layout)
    names = list(model.named_parameters(remove_duplicate=False))
    groups = _Groups(mesh)
    for name, parameter in names:
        ranks = _ranks(rank_of, plan.parameters[name])
        of_part = replace(parts.part(name), stages=ranks)
        if len(ranks) > 1 and parameter.requires_grad:
            of_part = replace(of_part, sum_over=(*of_part.sum_over, groups.of(ranks)))
        parts.table[name] = of_part
    # Buffers belong to the stages that call their unit.
    for name in parts.state:
        unit = next((unit for unit in plan.modules if name.startswith(f"{unit}.")), None)
        if name not in parts.table and unit is not None:
            # A stage that holds a unit for its shared parameters alone doesn't update its buffers.
            stages = plan.stages_of(unit) or plan.modules[unit]
            parts.table[name] = replace(parts.part(name), stages=_ranks(rank_of, stages))
    here = mesh.coordinate("pipeline")
    own_stages = [stage for stage, rank in enumerate(rank_of) if rank == here]
    return StagedModel(model, unsliced, plan, own_stages, device, trace, forward_context)


def _has_any(module: nn.Module) -> bool:
    """Whether a module has parameters."""
    return next(module.parameters(), None) is not None


def _ranks(rank_of: Sequence[int], stages: Stages) -> tuple[int, ...]:
    return tuple(sorted({rank_of[stage] for stage in stages}))


def pipelines(mesh: Mesh) -> list[list[int]]:
    """The global ranks of every pipeline of the grid, in one order on every rank.

    [pipelines][pipeline ranks]: all lists of ranks that differ along the pipeline axis alone.
    """
    grid = mesh.grid.mesh.movedim(0, -1)  # [replicate, shard, context, tensor, pipeline]
    return grid.reshape(-1, grid.shape[-1]).tolist()


class _Groups:
    """Cache of process groups of some ranks of each pipeline. All ranks make all groups, in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of some pipeline ranks in this rank's own pipeline. Every rank of the world asks."""
        if ranks not in self._made:
            own_group: dist.ProcessGroup | None = None
            for line in pipelines(self._mesh):
                group = new_group([line[rank] for rank in ranks])
                if dist.get_rank() in line:
                    own_group = group  # for a rank that is no member, PyTorch's marker for non-members
            assert own_group is not None
            self._made[ranks] = own_group
        return self._made[ranks]
