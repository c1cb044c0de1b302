"""Partition: assign the calls and parameters of a model to pipeline stages, from a trace of its forward."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from samestep.errors import LayoutError, UserError, closest
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks, with_forward
from samestep.parallel.calls import Call, Trace
from samestep.parallel.layout_failure import instead_of_reentrant
from samestep.parallel.pipeline.units import Needs, UnitCall, UnitOutput, find_layers, unit_calls, units_of

Stages = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """The partition of a model into stages: intervals of its units' calls, each ending with a call of a layer."""

    blocks: Sequence[Call]  # calls of layers, in their order
    starts: Sequence[int]  # the first of each stage
    calls: Sequence[UnitCall]  # of layers, and of the largest modules that contain none, in their order
    ends: Sequence[int]  # for each stage, one past the number of its last call; the last stage ends with the model
    used: Sequence[frozenset[UnitOutput]]  # the outputs of earlier stages that each stage uses
    # The tensors that each stage but the last passes to the next: its own outputs, and those it carries along.
    handed_on: Sequence[Sequence[UnitOutput]]
    modules: Mapping[str, Stages]  # stages that hold a unit, by each of its names
    parameters: Mapping[str, Stages]  # stages that hold a parameter, by each of its names
    computed_with: Mapping[str, Stages]  # stages whose forward uses a parameter, by its first name
    draws: Mapping[int, Mapping[str, int]]  # for calls of units that several stages call: random draws, by module

    @property
    def stages(self) -> int:
        return len(self.starts)

    def stage_of_call(self, number: int) -> int:
        """The stage of one of `calls`."""
        return bisect_right(self.ends, number)

    def stages_of(self, unit: str) -> Stages:
        """The stages that call a unit."""
        return frozenset(self.stage_of_call(number) for number in self.calls_of(unit))

    def calls_of(self, unit: str) -> Sequence[int]:
        """The numbers of a unit's calls."""
        return self._by_unit.get(unit, ())

    def given(self, caller: int, number: int) -> UnitOutput | None:
        """The passed-on tensor with this number in a call's output; None if it is not passed on."""
        return self._by_place.get((caller, number))

    def is_handed_on(self, unit: str) -> bool:
        """Whether later stages use an output of a unit."""
        return any(self.calls[caller].unit == unit for caller, _ in self._by_place)

    def taken(self, stage: int) -> Sequence[UnitOutput]:
        """The outputs of earlier stages that a stage uses, in order."""
        return sorted(self.used[stage], key=UnitOutput.place)

    def computed_in(self, stage: int) -> Mapping[int, Sequence[UnitOutput]]:
        """The tensors that a stage has computed itself and passes on, by call."""
        by_caller: dict[int, list[UnitOutput]] = {}
        for output in self.handed_on[stage] if stage < self.stages - 1 else ():
            if self.stage_of_call(output.caller) == stage:
                by_caller.setdefault(output.caller, []).append(output)
        return by_caller

    @cached_property
    def _by_unit(self) -> dict[str, list[int]]:
        """The numbers of calls by unit."""
        by_unit: dict[str, list[int]] = {}
        for number, call in enumerate(self.calls):
            by_unit.setdefault(call.unit, []).append(number)
        return by_unit

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], UnitOutput]:
        return {(output.caller, output.number): output for stage in self.handed_on for output in stage}


def make_plan(model: nn.Module, layout: Layout, trace: Trace, cut_at: Sequence[str] = ()) -> PartitionPlan:
    """Partition a model's forward into the layout's stages, and find the tensors that stages need of each other.

    A stage has the calls of units between two cuts. The outputs of earlier stages that it uses are found in the
    dataflow of the traced forward, so that skip connections, an encoder's output that every decoder layer uses,
    masks, position biases, tied weights and parameters between the layers are all handled.

    Raises LayoutError if the model has too few layers, or can't be cut between them.
    """
    stages = layout.pipeline * layout.stages_a_rank
    layers = find_layers(model, trace, stages)
    units = units_of(model, trace, layers)
    calls = unit_calls(model, trace, units)
    _check_functions(layout, calls)
    needs = Needs(trace, calls)
    blocks = [call.call for call in calls if call.unit in layers]
    at = [number for number, unit_call in enumerate(calls) if unit_call.unit in layers]
    allowed, why_not = _allowed_starts(needs, calls, at)
    if len(allowed) < stages:
        names = [name for name, module in model.named_modules() if module in with_forward(find_blocks(model))]
        raise LayoutError(f'layout "{layout}": {_too_few(layout, stages, len(allowed), names, why_not)}')
    if cut_at:
        starts = _starts_at(cut_at, [block.name for block in blocks], stages)
        _check_starts(layout, starts, allowed, blocks, why_not)
    else:
        if layout.balance == "memory":
            modules = [model.get_submodule(block.name) for block in blocks]
            cost = memory_cost(trace, blocks, modules, model, layout)
        else:
            cost = time_cost(trace, blocks)
        # Layers between two allowed starts can't be separated, so they are one block for the search.
        edges = [*allowed, len(blocks)]
        chosen = best_starts(len(allowed), stages, lambda stage, a, b: cost(stage, edges[a], edges[b]))
        starts = [allowed[number] for number in chosen]
    # A stage ends right after the call of its last layer; calls between two layers belong to the later stage.
    ends = [*(at[start - 1] + 1 for start in starts[1:]), len(calls)]
    _check_asked(model, layout, needs, calls)
    used, parameters = _of_stages(model, trace, needs, calls, ends)
    by_module, by_parameter = _hold_alike(model, units, calls, ends, parameters)
    return PartitionPlan(
        blocks=blocks,
        starts=starts,
        calls=calls,
        ends=ends,
        used=used,
        handed_on=_handed_on(used, ends),
        modules=by_module,
        parameters=by_parameter,
        computed_with=parameters,
        draws=_draws_of_shared(trace, calls, ends),
    )


def _too_few(layout: Layout, stages: int, possible: int, layers: Sequence[str], why_not: Mapping[int, str]) -> str:
    """Explain why a model can't be cut into that many stages, and what to use instead."""
    if possible > 1:
        but = f", since {next(iter(why_not.values()))}" if why_not else ""
        return f"{stages} pipeline stages for {possible} layers{but}; use {possible} stages or fewer"
    start = f"{layers[0]} and the like are not called, so there is" if layers and not possible else "it has"
    if why_not:
        return (
            f"the model can't be cut, since {next(iter(why_not.values()))}; use dp{layout.size} or fsdp{layout.size}"
        )
    return (
        f"{stages} pipeline stages want as many layers that the model's forward calls one after the other, and "
        f"{start} {possible or 'none'}; use dp{layout.size} or fsdp{layout.size}"
    )


def _allowed_starts(needs: Needs, calls: Sequence[UnitCall], at: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """The indices of layers' calls that may begin a stage, and the reasons why others may not.

    `at`: the number of each layer's call among those of all units. A stage only gets outputs of earlier calls, and
    not tensors that they stored elsewhere, such as in an attribute.
    """
    refused: dict[int, str] = {}
    of_output = (len(calls), needs.of_output)
    for reader, need in [*enumerate(needs.of_calls), of_output]:
        for writer in need.hidden:
            taker = calls[reader].unit if reader < len(calls) else "the model's output"
            reason = f"{taker} takes a tensor that {calls[writer].unit} computes and does not return"
            if taker == calls[writer].unit:
                reason = f"each call of {taker} takes a tensor that the one before keeps, such as a buffer"
            for start in range(1, len(at)):
                if writer <= at[start - 1] < reader:
                    refused.setdefault(start, reason)
    return [start for start in range(len(at)) if start not in refused], refused


def _check_functions(layout: Layout, calls: Sequence[UnitCall]) -> None:
    """Raise LayoutError where an autograd.Function calls units: a stage's outputs would be without a gradient."""
    inside = next((call.call for call in calls if call.call.inside), None)
    if inside is None:
        return
    if inside.inside == CheckpointFunction.__name__:
        function = "torch.utils.checkpoint with use_reentrant=True"
        instead = instead_of_reentrant(layout)
    else:
        function = f"the autograd.Function {inside.inside}"
        instead = f"dp{layout.size}"
    raise LayoutError(
        f'layout "{layout}": {function} calls {inside.name}, and takes its gradient in a backward of its own, so no '
        f"pipeline stage can; use {instead}"
    )


def _check_asked(model: nn.Module, layout: Layout, needs: Needs, calls: Sequence[UnitCall]) -> None:
    """Raise LayoutError where the forward asks for values, outside of units, that no stage can pass on."""
    for _, question, need in needs.of_asked:
        if not need.hidden and not need.parameters:
            continue
        kind = type(model.get_submodule(question.module)).__name__
        of = calls[min(need.hidden)].unit if need.hidden else min(need.parameters)
        why = "computes and does not return" if need.hidden else "is, a parameter outside of the layers"
        raise LayoutError(
            f'layout "{layout}": the forward of {question.module or kind} asks for values ({question.function}) of '
            f"what {of} {why}, and pipeline stages pass on outputs of layers alone; use dp{layout.size}, "
            f"zero1x{layout.size} or fsdp{layout.size}"
        )


def _starts_at(cut_at: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    """Resolve `run.cut_at` to the index of each stage's first layer. Raises UserError for wrong names or order."""
    for name in cut_at:
        if name not in blocks:
            raise UserError(f'run.cut_at: no layer "{name}"; {closest(name, list(dict.fromkeys(blocks)))}')
    starts = [0, *(blocks.index(name) for name in cut_at)]
    if starts != sorted(set(starts)):
        raise UserError(
            f"run.cut_at is {', '.join(cut_at)}; each names the first layer of a stage but the first, in order"
        )
    if len(starts) != stages:
        raise UserError(
            f"run.cut_at has {len(cut_at)} name{'' if len(cut_at) == 1 else 's'}, which makes {len(starts)} stages; "
            f"the layout has {stages}; use {stages - 1}"
        )
    return starts


def _check_starts(
    layout: Layout, starts: Sequence[int], allowed: Sequence[int], blocks: Sequence[Call], why_not: Mapping[int, str]
) -> None:
    """Raise LayoutError if the user cuts where a tensor is passed other than as an output."""
    for start in starts:
        if start not in allowed:
            names = ", ".join(blocks[other].name for other in allowed[1:4])
            raise LayoutError(
                f'layout "{layout}": run.cut_at can\'t name {blocks[start].name}, since {why_not[start]}; '
                f"use {names}, or leave run.cut_at out"
            )


def _of_stages(
    model: nn.Module, trace: Trace, needs: Needs, calls: Sequence[UnitCall], ends: Sequence[int]
) -> tuple[list[frozenset[UnitOutput]], dict[str, Stages]]:
    """The outputs of earlier stages that each stage uses, and the stages that use each parameter, by first name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    used: list[frozenset[UnitOutput]] = []
    parameters: dict[str, Stages] = {}
    for stage, (began, ended) in enumerate(pairwise([0, *ends])):
        call_needs = list(needs.of_calls[began:ended])
        if stage == len(ends) - 1:
            call_needs.append(needs.of_output)
        # Every stage that the forward reaches at that place asks too, and goes on as the answer says.
        call_needs += [need for before, _, need in needs.of_asked if before < ended or stage == len(ends) - 1]
        of_stage = {name for need in call_needs for name in need.parameters}
        for call in calls[began:ended]:
            of_stage |= {names[parameter] for parameter in model.get_submodule(call.unit).parameters()}
        for name in of_stage:
            parameters[name] = parameters.get(name, frozenset()) | {stage}
        used.append(frozenset(output for need in call_needs for output in need.given if output.caller < began))
    return used, parameters


def _draws_of_shared(trace: Trace, calls: Sequence[UnitCall], ends: Sequence[int]) -> dict[int, dict[str, int]]:
    """The random draws of each call of a unit that several stages call, by the module that draws.

    A dropout mask depends on the number of earlier draws of its module in this forward, including earlier stages.
    """
    stages: dict[str, set[int]] = {}
    for number, call in enumerate(calls):
        stages.setdefault(call.unit, set()).add(bisect_right(ends, number))
    draws_of_calls: dict[int, dict[str, int]] = {}
    for number, call in enumerate(calls):
        if len(stages[call.unit]) == 1:
            continue
        of_call = draws_of_calls[number] = {}
        for time, name, draws in trace.draws:
            if call.call.began <= time < call.call.ended:
                of_call[name] = of_call.get(name, 0) + draws
    return draws_of_calls


def _handed_on(used: Sequence[frozenset[UnitOutput]], ends: Sequence[int]) -> list[list[UnitOutput]]:
    """The tensors that each stage but the last passes on: all that later stages use and that exist by then."""
    handed = []
    for stage, end in enumerate(ends[:-1]):
        # Tensors pass from stage to stage: stages 1 and 2 carry along one that stage 3 uses of stage 0.
        later = {output for of_stage in used[stage + 1 :] for output in of_stage if output.caller < end}
        handed.append(sorted(later, key=UnitOutput.place))
    return handed


def _hold_alike(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    calls: Sequence[UnitCall],
    ends: Sequence[int],
    needed: Mapping[str, Stages],
) -> tuple[dict[str, Stages], dict[str, Stages]]:
    """The stages that hold each unit and each parameter name; units are held whole, shared ones by all users."""
    objects = dict(model.named_parameters(remove_duplicate=False))
    last = frozenset({len(ends) - 1})
    by_object: dict[int, Stages] = {}
    for name, parameter in objects.items():
        by_object[id(parameter)] = by_object.get(id(parameter), frozenset()) | needed.get(name, frozenset())
    by_unit: dict[str, Stages] = {name: frozenset() for name in units}
    # Fixed-point iteration: two units that share a parameter are held by the same stages.
    changed = True
    while changed:
        changed = False
        for name, unit in units.items():
            stages = by_unit[name].union(*(by_object[id(p)] for p in unit.parameters()))
            changed = changed or stages != by_unit[name]
            by_unit[name] = stages
            for parameter in unit.parameters():
                by_object[id(parameter)] |= stages
    # Units and parameters that no output depends on stay with the last stage.
    return (
        {name: stages or last for name, stages in by_unit.items()},
        {name: by_object[id(parameter)] or last for name, parameter in objects.items()},
    )


# (stage, first, last) -> the cost of blocks `first` to `last - 1` as that stage.
Cost = Callable[[int, int, int], float]


def best_starts(blocks: int, stages: int, cost: Cost) -> list[int]:
    """Find the first block of each stage so that the largest cost of a stage is minimal; no stage is empty.

    Ties are broken by the costs of earlier stages. Dynamic programming from the last stage to the first, with
    blocks^2 x stages evaluations of `cost`:

    best(s, i) = min over j of max(cost(s, i, j), best(s + 1, j)), as the slowest stage determines a pipeline's speed.
    """

    @cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        if stage == stages - 1:
            return cost(stage, first, blocks), ()
        options = []
        for following in range(first + 1, blocks - (stages - 1 - stage) + 1):
            rest, starts = best(stage + 1, following)
            options.append((max(cost(stage, first, following), rest), (following, *starts)))
        return min(options)

    return [0, *best(0, 0)[1]]


def time_cost(trace: Trace, blocks: Sequence[Call]) -> Cost:
    """Cost function: FLOPs of a forward, including modules before, between and after the blocks."""
    ends = [0, *(block.flops_after for block in blocks[:-1]), trace.flops]
    # Differences of the running count of multiplications between the ends of blocks.
    # A block without products takes a little time, too.
    seconds = [max(after - before, 1) for before, after in pairwise(ends)]
    return lambda stage, first, last: sum(seconds[first:last])


def memory_cost(
    trace: Trace, blocks: Sequence[Call], modules: Sequence[nn.Module], model: nn.Module, layout: Layout
) -> Cost:
    """Cost function: bytes of parameters, gradients, Adam's two states, and activations saved for backward.

    Stage s of n keeps the activations of n - s micro-batches in 1F1B; of the example's samples here.
    """
    copies = _COPIES[layout.zero](layout.shard)
    stages = layout.pipeline * layout.stages_a_rank
    held = [sum(p.numel() * p.element_size() for p in module.parameters()) for module in modules]
    inside = {id(p) for module in modules for p in module.parameters()}
    outside = [(name, p) for name, p in model.named_parameters() if id(p) not in inside]
    # Those before the blocks are in the first stage, all others in the last.
    early = trace.behind(blocks[0].outputs())
    for name, parameter in outside:
        held[0 if name in early else -1] += parameter.numel() * parameter.element_size()
    kept = [0] * len(blocks)
    for call in trace.calls:
        here = next((i for i, block in enumerate(blocks) if call.began <= block.ended), len(blocks) - 1)
        if call.ended == call.began + 1:  # nothing was called in between
            kept[here] += sum(_bytes(tensor.shape, tensor.dtype.itemsize) for tensor in call.outputs())
    return lambda stage, first, last: copies * sum(held[first:last]) + (stages - stage) * sum(kept[first:last])


# Copies of a parameter that a rank holds by what is sharded over n ranks: itself, its gradient, Adam's two states.
_COPIES: dict[int, Callable[[int], float]] = {
    0: lambda n: 4,
    1: lambda n: 2 + 2 / n,
    2: lambda n: 1 + 3 / n,
    3: lambda n: 4 / n,
}


def _bytes(shape: Sequence[int], element_bytes: int) -> int:
    count = element_bytes
    for size in shape:
        count *= size
    return count
