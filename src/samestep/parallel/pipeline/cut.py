"""Cut: what is left of a model on one rank of a pipeline, and how its own forward runs one stage."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh, new_group
from samestep.layout import Layout
from samestep.parallel.calls import Call, Trace
from samestep.parallel.parts import Parts
from samestep.parallel.pipeline.hollow import BlankOutput, Received, blank, hidden_of, hollow
from samestep.parallel.pipeline.plan import Plan, Stages, make_plan, units_of
from samestep.parallel.pipeline.rules import owners
from samestep.tasks.base import call


class HandedOn(BaseException):
    """Ends the model's forward at the last layer of a stage. No Exception, which a model may catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a pipeline stage is done")
        self.hidden = hidden


class Cut(nn.Module):
    """A model of which one rank holds some stages; a forward runs one of them.

    The model's own forward runs on the micro-batch's own inputs, whichever the stage. Hollow modules stand for
    what belongs to other stages: those before the stage give blanks, the one right before it gives the hidden
    state that was received, and after the stage's last block the forward ends.
    """

    def __init__(self, model: nn.Module, plan: Plan, mine: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self.mine = mine
        self._received: Tensor | None = None
        self._places: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {stage: [] for stage in mine}
        self.blocks: list[nn.Module] = []
        self._device = device
        units = units_of(model, [block.name for block in plan.blocks])
        for name, unit in units.items():
            self._place(name, unit)
        for stage in mine:
            own = (unit for name, unit in units.items() if plan.stage_of_block(name) == stage)
            self.blocks += own
        self._drop_parameters(units)

    def _place(self, name: str, unit: nn.Module) -> None:
        """Put a hollow module where one isn't needed: for good, or while another of this rank's stages runs."""
        parent_name, _, key = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        stages = self.plan.modules[name]
        blank_output: BlankOutput | None = None
        for stage in self.mine:
            if stage in stages:
                continue
            forward = self._forward_of(name, stage)
            if forward is None:
                blank_output = blank_output or BlankOutput(unit, self._call_of(name), self._device)
                forward = blank_output
            self._places[stage].append((parent, key, hollow(unit, self._device, forward)))
        if not stages & set(self.mine):
            parent._modules[key] = hollow(unit, self._device)

    def _forward_of(self, name: str, stage: int) -> Received | None:
        if stage and name == self.plan.last_block(stage - 1).name:
            hidden = self.plan.hidden[stage - 1]
            changed = hidden.identity in self.plan.changed
            return Received(
                self.plan.last_block(stage - 1), hidden.identity, self._hidden, self._device, changed=changed
            )
        return None

    def _hidden(self) -> Tensor:
        assert self._received is not None
        return self._received

    def _call_of(self, name: str) -> Any:
        return next((block for block in self.plan.blocks if block.name == name), None)

    def _drop_parameters(self, units: Mapping[str, nn.Module]) -> None:
        """Blanks for the parameters of modules that contain blocks, where no stage of this rank needs them."""
        inside = {id(p) for unit in units.values() for p in unit.parameters()}
        for module_name, module in self.model.named_modules():
            for key, parameter in list(module._parameters.items()):
                name = f"{module_name}.{key}" if module_name else key
                if parameter is None or id(parameter) in inside or self.plan.parameters[name] & set(self.mine):
                    continue
                del module._parameters[key]
                vars(module)[key] = blank(parameter.shape, parameter.dtype, self._device)

    def end_stages(self) -> None:
        """Make the last block of each stage end the forward. To come last, after what else is done to the blocks."""
        for stage in self.mine:
            if stage < self.plan.stages - 1:
                call = self.plan.last_block(stage)
                block = self.model.get_submodule(call.name)
                block.register_forward_hook(partial(_hand_on, call, self.plan.hidden[stage].identity))

    def forward(self, stage: int, inputs: Any, received: Tensor | None) -> Any:
        """The hidden state that a stage hands on, or of the last stage the model's output."""
        with self._arranged(stage, received):
            try:
                return call(self.model, inputs)
            except HandedOn as done:
                return done.hidden

    @contextmanager
    def _arranged(self, stage: int, received: Tensor | None) -> Iterator[None]:
        before = [(parent, key, parent._modules[key]) for parent, key, _ in self._places[stage]]
        for parent, key, module in self._places[stage]:
            parent._modules[key] = module
        self._received = received
        try:
            yield
        finally:
            self._received = None
            for parent, key, module in before:
                parent._modules[key] = module

    def weights_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters of this rank that a stage computes with."""
        needed = {name for name, stages in self.plan.parameters.items() if stage in stages}
        return [p for name, p in self.model.named_parameters() if name in needed and p.requires_grad]


def _hand_on(traced: Call, hidden: int, module: nn.Module, arguments: Any, output: Any) -> None:
    raise HandedOn(hidden_of(traced, hidden, output))


def cut(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    trace: Trace,
    parts: Parts,
    cut_at: Sequence[str],
    device: torch.device,
) -> Cut:
    """Leave of a model what this rank's stages need, and write down in `parts` who holds what.

    Nothing is asked of the parameters but their shapes: they may be on the meta device. Stages run on `device`.

    Raises LayoutError where the model can't be cut so.
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
    for name in parts.state:
        unit = next((unit for unit in plan.modules if name.startswith(f"{unit}.")), None)
        if name not in parts.table and unit is not None:
            parts.table[name] = replace(parts.part(name), stages=_ranks(rank_of, plan.modules[unit]))
    here = mesh.coordinate("pipeline")
    return Cut(model, plan, [stage for stage, rank in enumerate(rank_of) if rank == here], device)


def _ranks(rank_of: Sequence[int], stages: Stages) -> tuple[int, ...]:
    return tuple(sorted({rank_of[stage] for stage in stages}))


def pipelines(mesh: Mesh) -> list[list[int]]:
    """The global ranks of every pipeline of the grid, in one order on every rank."""
    grid = mesh.grid.mesh.movedim(0, -1)  # [replicate, shard, context, tensor, pipeline]
    return grid.reshape(-1, grid.shape[-1]).tolist()


class _Groups:
    """Process groups of some ranks of each pipeline. All ranks make all of them, in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._made:
            mine: dist.ProcessGroup | None = None
            for line in pipelines(self._mesh):
                group = new_group([line[rank] for rank in ranks])
                if dist.get_rank() in line:
                    mine = group  # of a rank that is no member, a mark that nobody uses
            assert mine is not None
            self._made[ranks] = mine
        return self._made[ranks]
