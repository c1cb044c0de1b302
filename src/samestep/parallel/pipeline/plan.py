"""Plan: which blocks and parameters of a model each pipeline stage needs, found from a trace of its forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks, with_forward
from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.pipeline.balance import best_starts, memory_cost, time_cost
from samestep.validation import closest

Stages = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model cut into stages."""

    blocks: Sequence[Call]  # in the order in which they are called
    starts: Sequence[int]  # the first block of each stage
    modules: Mapping[str, Stages]  # stages that run a module: each block, and the largest modules without one
    parameters: Mapping[str, Stages]  # stages that hold a parameter, by each of its names
    hidden: Sequence[Seen] = ()  # what each stage but the last hands on
    changed: frozenset[int] = frozenset()  # the identities of those that the model changes in place afterwards

    @property
    def stages(self) -> int:
        return len(self.starts)

    def last_block(self, stage: int) -> Call:
        return self.blocks[(*self.starts[1:], len(self.blocks))[stage] - 1]

    def stage_of_block(self, name: str) -> int | None:
        """The stage of a block; None where the module is no block."""
        number = next((i for i, block in enumerate(self.blocks) if block.name == name), None)
        return None if number is None else max(s for s, start in enumerate(self.starts) if start <= number)


def make_plan(model: nn.Module, layout: Layout, trace: Trace, cut_at: Sequence[str] = ()) -> Plan:
    """Cut a model's blocks into the layout's stages, and find what else each stage needs.

    A stage needs the parameters from which the tensor that it hands on is computed, without looking behind the
    tensor that it received. That is asked of autograd's graph of the traced forward, so that tied weights,
    parameters used in several places, and whatever stands between the blocks are found as they are.

    Raises LayoutError where the model has too few blocks, or does not pass one tensor from block to block.
    """
    names = {id(module): name for name, module in model.named_modules()}
    modules = {names[id(block)]: block for block in with_forward(find_blocks(model))}
    blocks = _called_once(layout, trace, list(modules))
    stages = layout.pipeline * layout.stages_a_rank
    if len(blocks) < stages:
        raise LayoutError(f'layout "{layout}": {_too_few(layout, stages, len(blocks), list(modules))}')
    if cut_at:
        starts = _starts_at(cut_at, [block.name for block in blocks], stages)
    elif layout.balance == "memory":
        found = [modules[block.name] for block in blocks]
        starts = best_starts(len(blocks), stages, memory_cost(trace, blocks, found, model, layout))
    else:
        starts = best_starts(len(blocks), stages, time_cost(trace, blocks))
    hidden = [_handed_on(layout, trace, blocks[start - 1]) for start in starts[1:]]
    needed = _needed(trace, hidden)
    plan = Plan(blocks=blocks, starts=starts, modules={}, parameters={})
    by_module, by_parameter = _hold_alike(model, plan, needed)
    _check_blocks(layout, model, plan, by_parameter)
    return Plan(
        blocks=blocks,
        starts=starts,
        modules=by_module,
        parameters=by_parameter,
        hidden=hidden,
        changed=frozenset(seen.identity for seen in hidden if trace.changed_in_place(seen)),
    )


def _too_few(layout: Layout, stages: int, called: int, layers: Sequence[str]) -> str:
    if called > 1:
        return f"{stages} pipeline stages for {called} layers; {called} stages or fewer would do"
    given = f"{layers[0]} and the like are not called, so there is" if layers and not called else "it has"
    return (
        f"{stages} pipeline stages want as many layers that the model's forward calls one after the other, and "
        f"{given} {called or 'none'}; use dp{layout.size} or fsdp{layout.size}"
    )


def _called_once(layout: Layout, trace: Trace, names: Sequence[str]) -> list[Call]:
    calls = []
    for name in names:
        of_block = trace.of(name)
        if len(of_block) > 1:
            raise LayoutError(
                f'layout "{layout}": {name} is called {len(of_block)} times in one forward, and a pipeline passes '
                "each of its layers once; a layout without pp would do"
            )
        calls += of_block
    return sorted(calls, key=lambda call: call.began)


def _starts_at(cut_at: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    for name in cut_at:
        if name not in blocks:
            raise UserError(f'run.cut_at: no layer "{name}"; {closest(name, blocks)}')
    starts = [0, *(blocks.index(name) for name in cut_at)]
    if starts != sorted(set(starts)):
        raise UserError(
            f"run.cut_at is {', '.join(cut_at)}; each names the first layer of a stage but the first, in order"
        )
    if len(starts) != stages:
        raise UserError(
            f"run.cut_at has {len(cut_at)} name{'' if len(cut_at) == 1 else 's'}, which makes {len(starts)} stages; "
            f"the layout has {stages}, so {stages - 1} would do"
        )
    return starts


def _handed_on(layout: Layout, trace: Trace, block: Call) -> Seen:
    """The one tensor of a block's output that is computed in it and that later layers take."""
    # What it only passes on, each stage has by itself.
    taken = {seen.identity: seen for seen in trace.taken_after(block) if not block.passed_on(seen)}
    if len(taken) != 1:
        raise LayoutError(
            f'layout "{layout}": {block.name} gives {len(taken) or "no"} tensors that layers after it take, and a '
            f"stage hands on one, the hidden state; use dp{layout.size} or fsdp{layout.size}, or name other layers "
            "to begin stages with in run.cut_at"
        )
    (hidden,) = taken.values()
    if not (hidden.dtype.is_floating_point or hidden.dtype.is_complex):
        raise LayoutError(
            f'layout "{layout}": {block.name} hands on a tensor of {hidden.dtype}, which has no gradient; '
            f"use dp{layout.size} or fsdp{layout.size}"
        )
    return hidden


def _needed(trace: Trace, hidden: Sequence[Seen]) -> dict[str, Stages]:
    """The stages that need a parameter, by the name that the trace knows it by."""
    (whole,) = trace.of("")
    ends = [*([each] for each in hidden), whole.outputs()]
    needed: dict[str, Stages] = {}
    for stage, end in enumerate(ends):
        received = ends[stage - 1] if stage else []
        for name in trace.behind(end, up_to=received):
            needed[name] = needed.get(name, frozenset()) | {stage}
    return needed


def _hold_alike(
    model: nn.Module, plan: Plan, needed: Mapping[str, Stages]
) -> tuple[dict[str, Stages], dict[str, Stages]]:
    """The stages of each module and of each parameter name. A module is held as a whole, and by all who share it."""
    objects = dict(model.named_parameters(remove_duplicate=False))
    last = frozenset({plan.stages - 1})
    by_object: dict[int, Stages] = {}
    for name, parameter in objects.items():
        by_object[id(parameter)] = by_object.get(id(parameter), frozenset()) | needed.get(name, frozenset())
    by_module: dict[str, Stages] = {}
    units = units_of(model, [block.name for block in plan.blocks])
    for name in units:
        stage = plan.stage_of_block(name)
        by_module[name] = frozenset() if stage is None else frozenset({stage})
    changed = True
    while changed:
        changed = False
        for name, unit in units.items():
            stages = by_module[name].union(*(by_object[id(p)] for p in unit.parameters()))
            changed = changed or stages != by_module[name]
            by_module[name] = stages
            for parameter in unit.parameters():
                by_object[id(parameter)] |= stages
    # What no output is computed from stays with the last stage.
    return (
        {name: stages or last for name, stages in by_module.items()},
        {name: by_object[id(parameter)] or last for name, parameter in objects.items()},
    )


def units_of(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """The blocks, and the largest modules with parameters that contain none."""
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        if name not in blocks and any(not name or block.startswith(f"{name}.") for block in blocks):
            for child_name, child in module._modules.items():  # also a second name of the same module
                if child is not None:
                    visit(f"{name}.{child_name}" if name else child_name, child)
        elif any(True for _ in module.parameters()):
            found[name] = module

    visit("", model)
    return found


def _check_blocks(layout: Layout, model: nn.Module, plan: Plan, parameters: Mapping[str, Stages]) -> None:
    """Refuse a model whose later stages need more of a block than the hidden state that it handed on."""
    for block in plan.blocks:
        own = plan.stage_of_block(block.name)
        for name, parameter in model.get_submodule(block.name).named_parameters(prefix=block.name):
            others = sorted(parameters[name] - {own})
            if not others:
                continue
            same = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter and n != name]
            why = (
                f"it is tied to {same[0]}"
                if same
                else f"layers of stage {others[0]} take more that is computed from it than the hidden state"
            )
            raise LayoutError(
                f'layout "{layout}": {name} of stage {own} is needed by stage {others[0]} too, since {why}; '
                "a layout without pp would do"
            )
