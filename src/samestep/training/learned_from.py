"""What a training learns from: looked at by one rank for all, and held against a checkpoint's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from samestep.checkpoint.code import code_of
from samestep.checkpoint.identity import Compared, LearnsFrom
from samestep.checkpoint.load import CheckpointLoader
from samestep.data.source_files import sources_of
from samestep.data.types import Samples
from samestep.errors import CheckpointError
from samestep.recipe import NamedOptimizer, Recipe
from samestep.tasks.base import Task

# What accepts other data, in a job and in a loop of one's own.
ACCEPT = "run.checkpoint.accept_data: true (--accept-data-change)"
ACCEPT_IN_LOOP = "session.resume(..., accept_data=True)"


def learns_from(
    task: Task,
    recipe: Recipe,
    samples: Samples,
    kinds: Iterable[type[nn.Module]],
    values: Mapping[str, str],
) -> LearnsFrom:
    """What a task's training learns from.

    `samples`: those it trains on; `kinds`: the classes of its model's modules; `values`: what it and the model hold.
    """
    optimizers = [recipe.optimizer, *(group.optimizer for group in recipe.groups)]
    objects = [task, samples, *_handed_over(task), *sorted(kinds, key=lambda kind: kind.__qualname__)]
    named = [optimizer.name for optimizer in optimizers if isinstance(optimizer, NamedOptimizer)]
    objects += [name for name in named if not isinstance(name, str)]
    files = [Path(name.rpartition(":")[0]) for name in named if isinstance(name, str) and ".py:" in name]
    return LearnsFrom(
        train=samples,
        held_out=task.eval_set,
        sources=partial(sources_of, {"data": recipe.data, "args": recipe.args}),
        code=partial(code_of, objects, files),
        values=values,
    )


def _handed_over(task: Task) -> Iterator[Any]:
    """The functions and models that a task was built with."""
    for value in getattr(task, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            yield from {type(module) for module in value.modules()}
        elif callable(value):
            yield value


def looked(learns: LearnsFrom, loader: CheckpointLoader | None, group: dist.ProcessGroup) -> Compared:
    """What rank 0 finds, on every rank; all must call it. `group`: a CPU group of all."""
    outcome: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [learns.look(None if loader is None else loader.info.identity)]
        except Exception as error:  # raised on all ranks, which would wait for this one
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def refuse_other_data(compared: Compared, where: Path, accept: str) -> None:
    """Raise CheckpointError for other data than those of a checkpoint. `accept`: what accepts them."""
    if compared.data:
        raise CheckpointError(
            f"the data are not those that {where} was trained with: {'; '.join(compared.data)}; give it those again, "
            f"or accept the present ones with {accept}"
        )


def told(compared: Compared, loader: CheckpointLoader) -> Iterator[str]:
    """What a resume says of changed data and code, a line each."""
    where = loader.folder
    if loader.info.identity is None:
        if loader.info.recipe or loader.info.step:  # else it is converted weights
            yield nothing_to_compare(where)
        return
    for line in compared.data:
        yield f"{line}; the training goes on with them"
    yield from compared.notes
    if compared.code:
        yield code_line(compared.code, where)
    if compared.values:
        yield values_line(compared.values, where)


def nothing_to_compare(where: Path) -> str:
    """The line about a checkpoint of an earlier version, or of a loop that was dealt no batches."""
    return f"{where} doesn't say which data and code it was trained with; they are not compared"


_MOST_NAMED = 6  # files


def code_line(names: Sequence[str], where: Path) -> str:
    """The line that tells of changed code, which is no reason to refuse it."""
    return (
        f"the code has changed since {where} was saved, in {_some(names)}; the training goes on with the present one"
    )


def values_line(differences: Sequence[str], where: Path) -> str:
    """The line that tells of changed values of the task or the model."""
    return (
        f"the task or its model holds other values than when {where} was saved: {_some(differences)}; the training "
        "goes on with the present ones"
    )


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return f"{', '.join(words[:_MOST_NAMED])}{more}"
