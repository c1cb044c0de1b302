"""Turns: a step in several parts, each with its own loss, its own parameters and its own rates, as GANs take it.

In each turn the model's forward runs with the keyword `turn`, the turn's name; its loss goes backward, and the turn's
parameters are stepped before the next turn's forward. What the loss asks of other parameters is thrown away.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.tasks.base import Task
from samestep.tasks.losses import TaskLoss, task_loss

if TYPE_CHECKING:
    from torch import nn

    from samestep.recipe import SGD, AdamW, NamedOptimizer, Recipe


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One part of a step."""

    name: str  # what the model's forward gets as `turn`
    parameters: Sequence[str]  # names or patterns of the parameters that it steps, such as "generator.*"
    loss: Callable[..., Any]  # (output, batch) -> sum and count, as `Task.loss`
    loss_weights: Mapping[str, float] = field(default_factory=dict)  # as `Task.loss_weights`
    optimizer: "AdamW | SGD | NamedOptimizer | None" = None  # None: the recipe's
    every: int = 1  # it is taken in steps `every` - 1, 2 * `every` - 1, ..., counted from 0

    def task_loss(self) -> TaskLoss:
        """Return the turn's loss in the form for a trainer."""
        return task_loss(self.loss, self.loss_weights)

    def steps(self, name: str) -> bool:
        """Whether it steps the parameter of that name."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)

    def is_of(self, step: int) -> bool:
        """Whether a step, counted from 0, has this turn."""
        return (step + 1) % self.every == 0


class InTurns(Task):
    """A task whose steps are taken in turns. Its model's forward takes the keyword `turn`.

    Evaluation and prediction call the model without it: give it a default, such as None.
    """

    @abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The turns of a step, in their order. Each trained parameter belongs to one of them."""

    def loss(self, output: Any, batch: Batch) -> Any:
        raise UserError(f"{type(self).__name__} has no loss of its own; use those of its turns()")


@dataclass(frozen=True)
class StepTurns:
    """The turns of a task's steps, given to a trainer instead of a loss."""

    turns: Sequence[Turn]
    nonfinite: bool = False  # a fault injection: the losses of this step become NaN

    def of_step(self, step: int) -> Iterator[Turn]:
        return (turn for turn in self.turns if turn.is_of(step))


def turns_of(task: Task) -> Sequence[Turn]:
    """The turns of a task's steps; none where it has one loss. Raises UserError for what are not turns."""
    if not isinstance(task, InTurns):
        return ()
    _check_no_loss(type(task))
    turns = task.turns()
    if not isinstance(turns, (list, tuple)) or not turns or not all(isinstance(turn, Turn) for turn in turns):
        raise UserError("turns() gives no list of turns; use [samestep.Turn(name=..., parameters=[...], loss=...)]")
    names = [turn.name for turn in turns]
    if len(set(names)) < len(names):
        raise UserError(f"turns(): two turns are called {max(names, key=names.count)}; use names of their own")
    for turn in turns:
        if isinstance(turn.parameters, str) or not callable(turn.loss):
            raise UserError(
                f'turns(): turn {turn.name} wants parameters=["..."], a list of names or patterns, and loss=, a '
                "function of output and batch"
            )
        if not isinstance(turn.every, int) or turn.every < 1:
            raise UserError(f"turns(): turn {turn.name} has every={turn.every}; use a number of steps, 1 or more")
    if all(turn.every > 1 for turn in turns):
        raise UserError("turns(): no turn is taken in every step; use every=1 for one of them")
    return turns


def _check_no_loss(kind: type[InTurns]) -> None:
    """Raise UserError where a class that writes turns(), or one made of it, writes a loss() as well."""
    of_turns, of_loss = (next(base for base in kind.__mro__ if name in vars(base)) for name in ("turns", "loss"))
    if of_loss is not InTurns and issubclass(of_loss, of_turns):
        raise UserError(
            f"{of_loss.__name__} writes loss(), which is not used, since its steps are taken in turns; leave it out, "
            "and give each turn its loss"
        )


def check_parameters(turns: Sequence[Turn], model: "nn.Module") -> None:
    """Raise UserError where a trained parameter is in no turn or in several, or a turn has none."""
    if not turns:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for turn in turns:
        for pattern in turn.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                examples = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
                raise UserError(
                    f'turns(): turn {turn.name} names the parameters "{pattern}"; the model has {examples}'
                )
    for name in names:
        stepping = [turn.name for turn in turns if turn.steps(name)]
        if len(stepping) != 1:
            where = "none" if not stepping else " and ".join(stepping)
            raise UserError(
                f"turns(): the parameter {name} belongs to {where} of the turns; have one of them name it, or use "
                "requires_grad_(False) for what is not trained"
            )


def check_optimizer_types(turns: Sequence[Turn], recipe: "Recipe") -> None:
    """Raise UserError where a turn's optimizer is none, and for groups, which turns have in their place."""
    from samestep.recipe import SGD, AdamW, NamedOptimizer

    for turn in turns:
        if turn.optimizer is not None and not isinstance(turn.optimizer, (AdamW, SGD, NamedOptimizer)):
            raise UserError(
                f"turns(): turn {turn.name} has a {type(turn.optimizer).__name__} as its optimizer; use "
                'samestep.AdamW(lr=...), samestep.SGD(lr=...) or samestep.NamedOptimizer(name="torch.optim.RMSprop")'
            )
    if recipe.groups:
        raise UserError("recipe.groups is given, and the task takes its steps in turns; give each Turn its optimizer")
