"""Optimizers and learning-rate schedules from a recipe: which optimizer steps which parameters with which settings.

Groups are planned from the whole model: patterns are matched against its parameter names before it is spread
(`_planned`), so that a rank with a stage, an expert or a shard has the groups of one process. A parameter belongs to
the first group that matches it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.engines.base import Engine
from samestep.errors import LayoutError, UserError, closest
from samestep.job import Job
from samestep.launch.device import device_of
from samestep.layout import Layout
from samestep.parallel.optimizer.joined import Joined, OptimizerMember
from samestep.parallel.optimizer.kinds import Make, Shapes
from samestep.parallel.optimizer.rounded import RoundedState
from samestep.recipe import SGD, AdamW, Group, NamedOptimizer, Recipe
from samestep.tasks.turns import Turn
from samestep.training.named_optimizer import maker_of, takes, title_of, try_out
from samestep.training.schedule import SCHEDULE


def make_optimizer(spec: AdamW | SGD, groups: Sequence[dict[str, Any]], *, fused: bool = True) -> Optimizer:
    """Make AdamW or SGD over parameter groups, with PyTorch's fused kernel if `fused` and where it has one."""
    make = _MAKERS[type(spec)](spec)
    parameters = [parameter for group in groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    if (
        not fused
        or (sharded and type(spec) not in _FUSED_ON_SHARDS)
        or any(parameter.is_complex() for parameter in parameters)
    ):
        return make(groups)
    try:
        return make(groups, fused=True)
    except RuntimeError:  # no fused kernel for this device or dtype
        return make(groups)


def _plain(spec: "Spec") -> TypeGuard[AdamW | SGD]:
    """Whether it is PyTorch's own elementwise optimizer, which can step any part of a parameter alone."""
    return not isinstance(spec, NamedOptimizer) and not (isinstance(spec, AdamW) and spec.state != "full")


def _adamw(spec: AdamW) -> Callable[..., Optimizer]:
    """The factory of AdamW with moments in full precision, in bf16 or in 8 bits."""
    adamw = partial(torch.optim.AdamW, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    return adamw if spec.state == "full" else partial(RoundedState, kind=adamw, state=spec.state, lr=spec.lr)


def _sgd(spec: SGD) -> Callable[..., Optimizer]:
    return partial(torch.optim.SGD, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)


_MAKERS: dict[type, Callable[[Any], Callable[..., Optimizer]]] = {AdamW: _adamw, SGD: _sgd}

# The fused kernels of the others fail on DTensor shards, and only when they are called.
_FUSED_ON_SHARDS = {AdamW}


def of_one_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a group into DTensor and plain parameters: PyTorch's fused kernels don't take both at once."""
    shards = [p for p in group["params"] if isinstance(p, DTensor)]
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    return [{**group, "params": shards}, {**group, "params": whole}]


Spec = AdamW | SGD | NamedOptimizer
_FEWEST_TO_DECAY = 2  # dimensions


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The parameters of the recipe's optimizer, or of one of its groups, and their settings."""

    where: str  # its key in the recipe, for messages
    names: Sequence[str]  # of parameters, in the whole model
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float | None = None  # for all its parameters; None: the optimizer's, for matrices only


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Sections that one optimizer steps."""

    spec: Spec
    where: str
    sections: Sequence[_Section]


class OptimizerPlan:
    """Makes the optimizer of the parameters that a rank holds, given by their names in the whole model."""

    def __init__(self, recipe: Recipe, model: nn.Module, turn: Turn | None = None, *, fused: bool = True) -> None:
        """`model` is whole; its parameters may be on the meta device. `turn`: the turn whose parameters it steps.

        `fused`: whether fused kernels may be used. On a CPU they round the last few elements of a tensor differently
        from the rest, and which elements these are depends on the sharding.

        Raises UserError for a group that matches no parameter, and for an optimizer that can't be made.
        """
        if turn is not None and turn.optimizer is not None:
            recipe = replace(recipe, optimizer=turn.optimizer)
        self._turn = turn
        self._fused = fused
        self._lr = recipe.optimizer.lr
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (turn is None or turn.steps(name))
        }
        self._parts = self._planned(recipe, model)
        for part in self._parts:
            self._check(part)

    def _planned(self, recipe: Recipe, model: nn.Module) -> list[_Part]:
        """Plan the optimizers, and which sections of parameters each steps.

        A part is one optimizer; groups that name the same one share it. Parameters that no group matches go to the
        recipe's own optimizer.
        """
        taken: dict[str, int] = {}
        every_name: dict[str, list[str]] = {}
        first = {parameter: name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            every_name.setdefault(first[parameter], []).append(name)
        for number, group in enumerate(recipe.groups):
            matching = [name for name in first.values() if _matches(group, every_name[name], _ndim(model, name))]
            _check_found(group, f"recipe.groups.{number}", matching, self._shapes, taken, every_name)
            taken |= {name: number for name in matching if name not in taken}
        parts = [_part(recipe.optimizer, where_of(self._turn), [n for n in self._shapes if n not in taken])]
        for number, group in enumerate(recipe.groups):
            where = f"recipe.groups.{number}"
            names = [name for name in self._shapes if taken.get(name) == number]
            section = _Section(where=where, names=names, settings=_settings(group), weight_decay=group.weight_decay)
            spec = group.optimizer or recipe.optimizer
            same_part = next((at for at, part in enumerate(parts) if part.spec == spec), None)
            if same_part is None:
                parts.append(_Part(spec=spec, where=f"{where}.optimizer", sections=[section]))
            else:
                parts[same_part] = replace(parts[same_part], sections=[*parts[same_part].sections, section])
        return [part for part in parts if any(section.names for section in part.sections)] or parts[:1]

    def _check(self, part: _Part) -> None:
        """Make an optimizer of empty parameters with the same shapes, so that it raises for those it can't step."""
        spec = part.spec
        if isinstance(spec, NamedOptimizer):
            for section in part.sections:
                for name in ("lr", "weight_decay"):
                    value = section.weight_decay if name == "weight_decay" else section.settings.get(name)
                    if value is not None and not takes(spec, name, part.where):
                        raise UserError(f"{section.where}.{name} is given, and {title_of(spec)} takes no {name}")
            make = maker_of(spec, part.where)
            for name in (name for section in part.sections for name in section.names):
                try:
                    make([{"params": [nn.Parameter(torch.empty(self._shapes[name], device="meta"))]}])
                except UserError as error:
                    raise UserError(
                        f"{error} (of the parameter {name}, of shape {tuple(self._shapes[name])}); "
                        "recipe.groups can give it another optimizer"
                    ) from error

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Make the optimizer of this rank's parameters, given by their names in the whole model."""
        held = by_name(parameters)
        (first, *others) = self._parts
        if not others and _plain(first.spec):
            return make_optimizer(first.spec, self._groups(first, held) or [{"params": []}], fused=self._fused)
        return Joined(self.members(held), lr=self.rate)

    def members(self, held: Mapping[str, list[nn.Parameter]]) -> list[OptimizerMember]:
        """The single optimizers over this rank's parameters, which `held` has by name."""
        return [self._member(part, held) for part in self._parts]

    def _member(self, part: _Part, held: Mapping[str, list[nn.Parameter]]) -> OptimizerMember:
        """One of several optimizers; without parameters on this rank, it has only the shapes of the whole model's."""
        make: Make
        if isinstance(part.spec, NamedOptimizer):
            make = maker_of(part.spec, part.where)
        else:
            make = partial(make_optimizer, part.spec, fused=self._fused)
        groups = self._groups(part, held)
        whole = [
            Shapes(settings=group["settings"], shapes=[self._shapes[name] for name in group["names"]])
            for group in self._split(part)
        ]
        return OptimizerMember(
            title=f"{part.where} ({title_of(part.spec)})",
            make=make,
            groups=whole,
            optimizer=make(groups) if groups else None,
            turn=None if self._turn is None else self._turn.name,
        )

    @property
    def rate(self) -> float:
        """The learning rate that a step reports: the recipe's optimizer's."""
        if self._lr is not None:
            return self._lr
        (part, *_) = self._parts
        assert isinstance(part.spec, NamedOptimizer)
        made = maker_of(part.spec, part.where)([{"params": [nn.Parameter(torch.empty(2, 2, device="meta"))]}])
        return float(made.param_groups[0]["lr"])

    def _groups(self, part: _Part, held: Mapping[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
        """This rank's parameter groups, split into DTensor and plain parameters, without empty ones."""
        groups = [
            {"params": [p for name in group["names"] for p in held.get(name, ())], **group["settings"]}
            for group in self._split(part)
        ]
        return [section for group in groups for section in of_one_kind(group) if section["params"]]

    def _split(self, part: _Part) -> list[dict[str, Any]]:
        """Split each section into matrices and tables, with weight decay, and vectors (biases, norms), without.

        Decay keeps the outputs of matrix products small; a bias and a norm's scale are no factors of one. A section's
        own decay applies to all its parameters.
        """
        spec, sections = part.spec, []
        decays = not isinstance(spec, NamedOptimizer) or takes(spec, "weight_decay", part.where)
        for section in part.sections:
            decay = section.weight_decay if section.weight_decay is not None else spec.weight_decay
            settings = dict(section.settings)
            with_decay = {"weight_decay": decay} if decay is not None else {}
            if section.weight_decay is not None or spec.decay_all or not decays:
                sections.append({"names": section.names, "settings": {**settings, **with_decay}})
                continue
            matrices = [name for name in section.names if len(self._shapes[name]) >= _FEWEST_TO_DECAY]
            vectors = [name for name in section.names if name not in {*matrices}]
            sections.append({"names": matrices, "settings": {**settings, **with_decay}})
            sections.append({"names": vectors, "settings": {**settings, "weight_decay": 0.0}})
        return [group for group in sections if group["names"]]


def plans_of(recipe: Recipe, model: nn.Module, turns: Sequence[Turn]) -> list[OptimizerPlan]:
    """The plan of each turn; without turns, one plan of all parameters."""
    return [OptimizerPlan(recipe, model, turn) for turn in turns] or [OptimizerPlan(recipe, model)]


def optimizer_of_turns(
    recipe: Recipe, model: nn.Module, turns: Sequence[Turn], parameters: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """Make one optimizer for steps in turns, over this rank's parameters, with each turn's settings in its groups.

    AdamW and SGD skip parameters without a gradient, and in a turn only its own have one. So where all turns have the
    same one of these, one optimizer over all parameters steps each turn's as a separate one would. Other optimizers
    are joined, and only those of the running turn step.
    """
    held = by_name(parameters)
    plans = plans_of(recipe, model, turns)
    specs = [turn.optimizer or recipe.optimizer for turn in turns]
    if len({type(spec) for spec in specs}) > 1 or not all(map(_plain, specs)):
        return Joined([member for plan in plans for member in plan.members(held)], lr=plans[0].rate)
    made = [
        plan((name, parameter) for name, some in held.items() if turn.steps(name) for parameter in some)
        for turn, plan in zip(turns, plans, strict=True)
        if any(map(turn.steps, held))
    ]
    first, *others = made
    for other in others:
        for group in other.param_groups:
            first.add_param_group(group)
    return first


def where_of(turn: Turn | None) -> str:
    """The key of a turn's optimizer, for messages."""
    return "recipe.optimizer" if turn is None or turn.optimizer is None else f"turns(): turn {turn.name}: optimizer"


def by_name(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, list[nn.Parameter]]:
    """Group trainable parameters by their name in the whole model; servers hold several pieces under one name."""
    held: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            held.setdefault(name, []).append(parameter)
    return held


def _part(spec: Spec, where: str, names: Sequence[str]) -> _Part:
    return _Part(spec=spec, where=where, sections=[_Section(where=where, names=names)])


def _settings(group: Group) -> dict[str, Any]:
    """The settings that a group changes: its learning rate and its schedule."""
    settings: dict[str, Any] = {} if group.lr is None else {"lr": group.lr}
    return settings if group.schedule is None else {**settings, SCHEDULE: group.schedule}


def _ndim(model: nn.Module, name: str) -> int:
    return model.get_parameter(name).ndim


def _matches(group: Group, names: Sequence[str], ndim: int) -> bool:
    """Whether a group's patterns match one of a parameter's names, and its number of dimensions fits."""
    if group.dims is not None and ndim != group.dims:
        return False
    return any(fnmatchcase(name, pattern) for name in names for pattern in group.parameters)


def _check_found(
    group: Group,
    where: str,
    matching: Sequence[str],
    trained: Mapping[str, Any],
    taken: Mapping[str, int],
    every_name: Mapping[str, Sequence[str]],
) -> None:
    """Raise UserError for a pattern that matches no parameter, or a group whose parameters earlier groups have."""
    all_names = [name for names in every_name.values() for name in names]
    for pattern in group.parameters:
        if not any(fnmatchcase(name, pattern) for name in all_names):
            raise UserError(
                f'{where}.parameters: "{pattern}" matches no parameter of the model; {_some(pattern, all_names)}'
            )
    if not matching:
        raise UserError(
            f"{where}: no parameter that matches has {group.dims} dimensions; leave dims out, or match others"
        )
    if not any(name in trained for name in matching):
        raise UserError(f"{where}: {matching[0]} and all others that match are frozen; leave the group out")
    left = [name for name in matching if name in trained and name not in taken]
    if not left:
        earlier = taken[next(name for name in matching if name in taken)]
        raise UserError(
            f"{where}: recipe.groups.{earlier} has all parameters that match; write the narrower group first"
        )


_SHOWN = 12  # names of parameters in a message


def _some(pattern: str, names: Sequence[str]) -> str:
    """A hint for a message: a similar name, or some of the names."""
    if len(names) <= _SHOWN:
        return closest(pattern, names)
    return f"{closest(pattern, names[:_SHOWN])}, and {len(names) - _SHOWN} more"


def check_turns_optimizers(turns: Sequence[Turn], job: Job, layout: Layout) -> None:
    """Raise UserError for a turn's optimizer that this layout or job doesn't support."""
    for turn in turns:
        if isinstance(turn.optimizer, NamedOptimizer):
            _check_named(turn.optimizer, where_of(turn), job, layout)


def check_average_start(recipe: Recipe, samples: int) -> None:
    """Raise UserError if the average of the weights starts after the last step. `samples`: in the training set."""
    steps = recipe.total_steps(-(-samples // recipe.batch))
    if recipe.average is not None and recipe.average.start >= steps:
        raise UserError(
            f"recipe.average.start is {recipe.average.start}, and the training takes {steps} steps, so it would "
            f"average nothing; use a start below {steps}"
        )


def check_recipe_optimizers(job: Job, engine: Engine, layout: Layout) -> None:
    """Raise UserError for optimizers that this engine, layout or job doesn't support.

    A named optimizer is looked up, its arguments are checked, and it steps a small matrix.
    """
    recipe, able = job.recipe, engine.abilities
    specs = {"recipe.optimizer": recipe.optimizer}
    specs |= {f"recipe.groups.{number}.optimizer": group.optimizer for number, group in enumerate(recipe.groups)}
    for where, spec in specs.items():
        if isinstance(spec, AdamW) and not _plain(spec):
            _check_rounded(spec, where, job, engine, layout)
        if not isinstance(spec, NamedOptimizer):
            continue
        if not able.own_optimizers:
            raise UserError(
                f'{where} is {spec.name}, and engine "{engine.name}" takes adamw or sgd; use one, or engine native'
            )
        _check_named(spec, where, job, layout)


def _check_rounded(spec: AdamW, where: str, job: Job, engine: Engine, layout: Layout) -> None:
    """Raise UserError if this engine, layout or job doesn't support Adam's averages in low precision."""
    subject = f"{where}.state is {spec.state}"
    if not engine.abilities.own_optimizers:
        raise UserError(f'{subject}, which engine "{engine.name}" does not have; use engine native')
    for option in ("optimizer", "optimizer-disk"):
        if layout.offloads(option):
            raise LayoutError(
                f'layout "{layout}": {subject}, and offload={option} takes the state off the device as it is; use one'
            )
    if job.run.share_replicas and layout.size > 1:
        raise UserError(f"{subject}, for which whole parameters are stepped, and run.share_replicas is true; use one")
    if job.run.reduction == "ordered":
        raise UserError(f"{subject} and run.reduction is ordered, which is for full state; use one")


def _check_named(spec: NamedOptimizer, where: str, job: Job, layout: Layout) -> None:
    """Raise UserError for a named optimizer that checkpoints or the layout don't support."""
    make = maker_of(spec, where)
    if device_of(0, job.run.device).type != "cpu":
        return  # its options may need the accelerator, which only the ranks use
    member = OptimizerMember(title=f"{where} ({spec.name})", make=make, groups=try_out(), optimizer=None)
    kind = member.kind(layout)
    if kind.settings_change and job.run.checkpoint is not None:
        raise UserError(
            f"{where} ({spec.name}) keeps {', '.join(kind.settings_change)} in its groups, which a checkpoint does "
            "not hold; keep it in its state, or train without run.checkpoint"
        )
    if not kind.by_number and job.run.share_replicas and layout.size > 1:
        raise UserError(
            f"run.share_replicas is true, with which ranks step rows of a parameter, and {where} ({spec.name}) looks "
            "at whole parameters; use share_replicas: false"
        )
