"""What a recipe says of optimizers, checked before any process starts."""

from collections.abc import Sequence

from samestep.cluster.device import device_of
from samestep.engines.base import Engine
from samestep.engines.resolve import check_average
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout
from samestep.parallel.joined_optimizer import Member
from samestep.recipe import NamedOptimizer, Recipe
from samestep.tasks.turns import Turn
from samestep.training.named_optimizer import maker_of, try_out
from samestep.training.optimizer_plan import where_of


def check_turns_optimizers(turns: Sequence[Turn], job: Job, layout: Layout) -> None:
    """Raise UserError for a turn's optimizer that can't be had with this layout or job."""
    for turn in turns:
        if isinstance(turn.optimizer, NamedOptimizer):
            _check_named(turn.optimizer, where_of(turn), job, layout)


def check_average_start(recipe: Recipe, samples: int) -> None:
    """Raise UserError where the average of the weights begins after the last step. `samples`: of the training set."""
    steps = recipe.total_steps(-(-samples // recipe.batch))
    if recipe.average is not None and recipe.average.start >= steps:
        raise UserError(
            f"recipe.average.start is {recipe.average.start}, and the training takes {steps} steps, so it would "
            f"average nothing; use a start below {steps}"
        )


def check_optimizers(job: Job, engine: Engine, layout: Layout) -> None:
    """Raise UserError for optimizers, groups or an average that can't be had with this engine, layout or job.

    An optimizer that is named is found, its arguments are checked, and it takes steps of a small matrix.
    """
    recipe, able = job.recipe, engine.abilities
    check_average(recipe.average, engine)
    if recipe.average is not None and job.run.share_replicas and layout.size > 1:
        raise UserError(
            "recipe.average is given and run.share_replicas is true, whose ranks have one copy of the weights; use "
            "share_replicas: false"
        )
    if recipe.groups and not able.own_optimizers:
        raise UserError(
            f'recipe.groups is given, and engine "{engine.name}" has one group of all parameters; use engine native'
        )
    specs = {"recipe.optimizer": recipe.optimizer}
    specs |= {f"recipe.groups.{number}.optimizer": group.optimizer for number, group in enumerate(recipe.groups)}
    for where, spec in specs.items():
        if not isinstance(spec, NamedOptimizer):
            continue
        if not able.own_optimizers:
            raise UserError(
                f'{where} is {spec.name}, and engine "{engine.name}" takes adamw or sgd; use one, or engine native'
            )
        _check_named(spec, where, job, layout)


def _check_named(spec: NamedOptimizer, where: str, job: Job, layout: Layout) -> None:
    make = maker_of(spec, where)
    if device_of(0, job.run.device).type != "cpu":
        return  # its options may be for the accelerator, which the ranks alone use
    member = Member(title=f"{where} ({spec.name})", make=make, groups=try_out(), optimizer=None)
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
