"""Stage: what is left of a model on one rank of a pipeline, and how its own forward runs one stage.

Placeholder modules, without parameters or computation, stand in a rank's model for modules of other stages.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from samestep.comm.mesh import Mesh, new_group
from samestep.layout import Layout
from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.nests import map_tensors, tensors_in
from samestep.parallel.pipeline.partition import Plan, Stages, make_plan
from samestep.parallel.pipeline.schedule import owners
from samestep.parallel.pipeline.stage_run import StageDone, StageRun
from samestep.parallel.pipeline.units import units_of
from samestep.parallel.sharding import ShardTable
from samestep.parallel.trace import imagine
from samestep.tasks.base import call

Forward = Callable[..., Any]


def hollow(module: nn.Module, device: torch.device, forward: Forward | None = None) -> nn.Module:
    """A module with the class and attributes of another, whose parameters are blank and which calls `forward`.

    The model's own code may look at a layer (its kind, a weight's dtype) without calling it.
    """
    empty = _shallow(module, type(module).__bases__[0] if is_parametrized(module) else type(module))
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            vars(empty)[name] = OrderedDict()
        elif isinstance(value, (list, tuple)):  # recurrent layers keep their parameters in a list too
            vars(empty)[name] = pytree.tree_map_only(nn.Parameter, partial(_blank_like, device=device), value)
        elif isinstance(value, Tensor) and value.requires_grad:  # a weight that is computed from others
            vars(empty)[name] = _blank_like(value, device)
    empty._parameters = {name: None for name, parameter in module._parameters.items() if parameter is None}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            vars(empty)[name] = _blank_like(parameter, device)
    if is_parametrized(module):
        for name, parameters in cast(nn.ModuleDict, module.parametrizations).items():
            # The largest of those from which it is computed has its shape.
            largest = max(parameters.parameters(recurse=False), key=Tensor.numel)
            vars(empty)[name] = _blank_like(largest, device)
    empty._modules = {
        name: child if child is None else hollow(child, device) for name, child in module._modules.items()
    }
    empty._non_persistent_buffers_set = set(module._buffers)  # not in this rank's state
    vars(empty)["forward"] = forward or _not_here
    return empty


def stand_in(module: nn.Module, device: torch.device, forward: Forward, *, held: bool) -> nn.Module:
    """A module that calls `forward` in place of another's.

    `held`: this rank has the other one's parameters, which the model's own code may then read from it.
    """
    if not held:
        return hollow(module, device, forward)
    standing = _shallow(module, type(module))
    for name in vars(module):
        if name.endswith("_hooks"):
            vars(standing)[name] = OrderedDict()
    vars(standing)["forward"] = forward
    return standing


def blank(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any shape that takes no memory. It is not a number, so that no model can learn from it unseen."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class BlankHidden(Tensor):
    """A blank in place of what a module gives, or of its weight: what a model writes to it takes no memory either.

    Without this, `x = self.embed(words); x += self.positions` would fail in every stage but the first, and so would a
    model that rescales the weights of its layers.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if args and isinstance(args[0], BlankHidden) and _writes(getattr(func, "__name__", ""), keywords):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **keywords)
            # A part of a blank is a blank.
            return pytree.tree_map_only(Tensor, _kept_blank, made)


def _writes(function: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True)."""
    dunder = function.startswith("__") and function.endswith("__")
    in_place = function[2:-2] in _IN_PLACE if dunder else function.endswith("_")
    return in_place or bool(keywords.get("inplace"))


_IN_PLACE = frozenset(
    {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "idiv"}
)


def _kept_blank(tensor: Tensor) -> Tensor:
    spread = tensor.numel() > 1 and not any(tensor.stride()) and tensor.layout is torch.strided
    return tensor.as_subclass(BlankHidden) if spread and not tensor.requires_grad else tensor


def _blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    return blank(tensor.shape, tensor.dtype, device).as_subclass(BlankHidden)


def _shallow(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module with the same attributes. Python's own copies refuse modules whose weights are computed."""
    empty = kind.__new__(kind)
    vars(empty).update(vars(module))
    return empty


def _not_here(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a module of another pipeline stage was called")


class BlankOutput:
    """Blanks of the shapes that a module would give, for the arguments that it is called with."""

    def __init__(self, module: nn.Module, call: Call, device: torch.device) -> None:
        """`module`: without numbers; `call`: one of its calls that was traced."""
        self._imagined = module
        self._call = call
        self._device = device
        self._known: dict[Any, Any] = {}
        self._wants_values = False

    def __call__(self, arguments: Any, keywords: Any) -> Any:
        """A nest like the module's output, in which an argument that it passes on as it is stands for itself."""
        given = tensors_in((arguments, keywords))
        output = self._like_arguments(self._pairs(arguments, keywords, given))
        if output is None:
            output = self._imagine(arguments, keywords)
        return map_tensors(partial(self._filled, given), output, Seen)

    def _filled(self, given: Sequence[Tensor], seen: Seen) -> Tensor:
        if seen.identity >= 0:
            return given[seen.identity]
        return blank(seen.shape, seen.dtype, self._device).as_subclass(BlankHidden)

    def _pairs(self, arguments: Any, keywords: Any, given: Sequence[Tensor]) -> dict[int, tuple[Seen, Tensor]]:
        """By the number of a tensor among those given, what stood in its place in the trace.

        A place may be empty in one of the two, as that of a mask is that hides nothing.
        """
        numbers = {id(tensor): number for number, tensor in enumerate(given)}
        before, now = (
            dict(pytree.tree_leaves_with_path(nest, is_leaf=lambda value: isinstance(value, Seen)))
            for nest in ((tuple(self._call.arguments), dict(self._call.keywords)), (tuple(arguments), dict(keywords)))
        )
        return {
            numbers[id(tensor)]: (before[path], tensor)
            for path, tensor in now.items()
            if id(tensor) in numbers and isinstance(before.get(path), Seen)
        }

    def _like_arguments(self, pairs: Mapping[int, tuple[Seen, Tensor]]) -> Any:
        """An output whose tensors have the shapes of arguments that had the same shapes in the trace.

        None where no argument had, or where those that had differ by now.
        """
        if not _is_plain(self._call.output):
            return None
        found: dict[int, Seen] = {}
        for number, (seen, now) in pairs.items():
            if any(seen.identity == each.identity and self._call.passed_on(each) for each in self._call.outputs()):
                found[seen.identity] = Seen(identity=number, shape=tuple(now.shape), dtype=now.dtype)
        for each in self._call.outputs():
            alike = {
                (tuple(now.shape), now.dtype)
                for seen, now in pairs.values()
                if (seen.shape, seen.dtype) == (each.shape, each.dtype)
            }
            if self._call.passed_on(each):
                if each.identity not in found:
                    return None
                continue
            if len(alike) != 1:
                return None
            ((shape, dtype),) = alike
            found[each.identity] = Seen(identity=-1, shape=shape, dtype=dtype)
        return map_tensors(lambda seen: found[seen.identity], self._call.output, Seen) if found else None

    def _imagine(self, arguments: Any, keywords: Any) -> Any:
        if not self._wants_values:
            leaves = pytree.tree_leaves((arguments, keywords))
            key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
            if key in self._known:
                return self._known[key]
            try:
                found = self._known[key] = imagine(self._imagined, arguments, keywords)
                return found
            except Exception:  # whatever a model's own code raises where it finds no values
                self._wants_values = True
        return imagine(self._imagined, arguments, keywords, valued=lambda tensor: not isinstance(tensor, BlankHidden))


def _is_plain(output: Any) -> bool:
    """Whether a traced output is of tensors, tuples and lists, which a trace keeps as they are."""
    if isinstance(output, (tuple, list)):
        return all(_is_plain(each) for each in output)
    return output is None or isinstance(output, Seen)


def without_numbers(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no memory."""
    tensors: Mapping[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    unreal: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        empty = torch.empty_like(tensor, device="meta")
        unreal[key] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    copy = _copied(module, unreal, {})
    return copy.eval()  # shapes are those of training, and dropout draws no masks for tensors without values


def _copied(module: nn.Module, unreal: Mapping[int, Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module and all in it, with other tensors in place of its own."""
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = _shallow(module, type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            copied._modules = {
                own: child if child is None else _copied(child, unreal, done) for own, child in value.items()
            }
        elif isinstance(value, (dict, list)):
            vars(copied)[name] = pytree.tree_map_only(Tensor, lambda tensor: unreal.get(id(tensor), tensor), value)
    # Other layouts replace forwards by functions that hold on to the module they were made for.
    vars(copied).pop("forward", None)
    return copied


class Cut(nn.Module):
    """A model of which one rank holds some stages; a forward runs one of them.

    The model's own forward runs on the micro-batch's own inputs, whichever the stage, with every unit replaced by a
    stand-in that asks the running stage what to do: compute, or give what was received and blanks for the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        unsliced: nn.Module,
        plan: Plan,
        mine: Sequence[int],
        device: torch.device,
        trace: Trace,
        now: ForwardContext,
    ) -> None:
        """`unsliced`: the model without numbers, as it was before any of it was sliced."""
        super().__init__()
        self.model = model
        self._unsliced = [unsliced]  # in a list, since it is no module of this one
        self.plan = plan
        self.mine = mine
        self._device = device
        self._now = now
        self._run: StageRun | None = None
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        units = units_of(model, trace, [block.name for block in plan.blocks])
        names = {id(module): name for name, module in model.named_modules()}
        layers = dict.fromkeys(block.name for block in plan.blocks if plan.stages_of(block.name) & set(mine))
        self.blocks: list[nn.Module] = [model.get_submodule(name) for name in layers]
        self._drop_parameters(units)
        standing: dict[str, nn.Module] = {}
        for name, unit in units.items():
            self._place(name, names[id(unit)], unit, standing)

    def _place(self, name: str, unit_name: str, unit: nn.Module, standing: dict[str, nn.Module]) -> None:
        """Make a stand-in for a unit, and where this rank has no stage that needs it leave nothing else of it."""
        parent_name, _, key = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        held = bool(self.plan.modules[name] & set(self.mine))
        if unit_name not in standing:
            standing[unit_name] = stand_in(unit, self._device, self._forward_of(unit_name, unit, held), held=held)
        self._places.append((parent, key, standing[unit_name]))
        if not held:
            parent._modules[key] = hollow(unit, self._device)

    def _forward_of(self, name: str, unit: nn.Module, held: bool) -> Callable[..., Any]:
        elsewhere = not self.plan.stages_of(name) <= set(self.mine)
        call = next((each.call for each in self.plan.calls if each.unit == name), None)
        several = len(self.mine) > 1
        # Of a sliced module its own code, with sizes of slices, would give other shapes.
        imagined = self._unsliced[0].get_submodule(name) if call is not None and (elsewhere or several) else None
        module = unit if held else None
        blanks = None if call is None or imagined is None else BlankOutput(imagined, call, self._device)

        def forward(*arguments: Any, **keywords: Any) -> Any:
            assert self._run is not None
            return self._run.call(name, module, blanks, arguments, keywords)

        return forward

    def _drop_parameters(self, units: Mapping[str, nn.Module]) -> None:
        """Blanks for the parameters of modules that contain units, where no stage of this rank needs them."""
        inside = {id(p) for unit in units.values() for p in unit.parameters()}
        for module_name, module in self.model.named_modules():
            for key, parameter in list(module._parameters.items()):
                name = f"{module_name}.{key}" if module_name else key
                if parameter is None or id(parameter) in inside or self.plan.parameters[name] & set(self.mine):
                    continue
                del module._parameters[key]
                vars(module)[key] = blank(parameter.shape, parameter.dtype, self._device)

    def forward(self, stage: int, inputs: Any, received: Sequence[Tensor]) -> Any:
        """What a stage has computed that it hands on, in the plan's order; of the last stage the model's output.

        `received`: what the stage takes of those before it (`Plan.used`, sorted).
        """
        run = StageRun(self.plan, stage, dict(zip(self.plan.taken(stage), received, strict=True)), self._now)
        with self._standing_in(run):
            try:
                output = call(self.model, inputs)
            except StageDone:
                return run.handed_on()
        if stage < self.plan.stages - 1:
            raise run.never_ended()
        return output

    @contextmanager
    def _standing_in(self, run: StageRun) -> Iterator[None]:
        before = [(parent, key, parent._modules[key]) for parent, key, _ in self._places]
        for parent, key, module in self._places:
            parent._modules[key] = module
        self._run = run
        try:
            yield
        finally:
            self._run = None
            for parent, key, module in before:
                parent._modules[key] = module

    def weights_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters of this rank that a stage computes with."""
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
    now: ForwardContext,
) -> Cut:
    """Leave of a model what this rank's stages need, and write down in `parts` who holds what.

    Nothing is asked of the parameters but their shapes: they may be on the meta device. Stages run on `device`.
    `unsliced` is the model without numbers, as it was before any of it was sliced.

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
    mine = [stage for stage, rank in enumerate(rank_of) if rank == here]
    return Cut(model, unsliced, plan, mine, device, trace, now)


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
