"""The rows on which a model is tried: the user's own, as the user's collator puts them together.

A collated batch is never cut: its first dimension need not be the samples, as where one tensor holds the patches of
all images. So whole, first part and rest are collated each by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from samestep.data.nests import equal, tensors_in
from samestep.data.sample_draws import sample_of
from samestep.data.types import Samples
from samestep.errors import UserError, described
from samestep.tasks.loss_terms import IGNORED, Part, is_mask
from samestep.tasks.model_loss import Parts

Collator = Callable[[Sequence[Any]], Mapping[str, Any]]

_HERE = "a few rows of data="
_FIRST, _REST = 2, 3  # unequal, so that a mean of means shows
_LOOKED_AT = 12  # rows from the beginning, as many from all over the set, and as many held-out ones: for their counts


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Rows to try a model on."""

    parts: Parts
    held_out: bool  # whether the rest are held-out rows


def chosen_rows(data: Samples, held_out: Samples | None, collate: Collator, name: str) -> Iterator[Chosen]:
    """Choose and collate rows; and others, for where a model can't take those.

    `name` is the collator's. Raises UserError where it fails, or gives another batch for the same rows.
    """
    rows = [sample_of(data, index) for index in _indices(len(data))]
    others = [sample_of(held_out, index) for index in range(min(_LOOKED_AT, len(held_out)))] if held_out else []
    _check_collator(rows[: _FIRST + _REST], collate, name)
    alone = _alone(rows, collate)
    unlike = _unlike(rows, alone, _FIRST + _REST)
    if others:
        alone_there = _alone(others, collate)
        rest = _unlike(others, alone_there, _REST)
        try:
            parts = _parts(unlike[:_FIRST], rest, collate, _HERE, "a few rows of eval_data=")
        except Exception:  # they may be of another kind, which the evaluation is checked for
            pass
        else:
            yield Chosen(parts=replace(parts, alone=[*alone, *alone_there]), held_out=True)
    for few in (unlike, rows[: _FIRST + _REST]):
        twice = few * 2 if len(few) == 1 else few
        cut = min(_FIRST, len(twice) // 2)
        parts = _parts(twice[:cut], twice[cut:], collate, _HERE, _HERE)
        yield Chosen(parts=replace(parts, alone=alone), held_out=False)


def _indices(length: int) -> list[int]:
    """The first rows, and some from all over the set."""
    spread = (length * place // _LOOKED_AT for place in range(_LOOKED_AT))
    return list(dict.fromkeys([*range(min(_LOOKED_AT, length)), *spread]))


def _alone(rows: Sequence[Any], collate: Collator) -> list[Part]:
    """Each row collated by itself; none where the collator needs several."""
    try:
        return [Part(inputs=collate([row]), rows=1, what="a row alone") for row in rows]
    except Exception:  # the rows are collated several at a time too, where a failure is told
        return []


def _unlike(rows: Sequence[Any], alone: Sequence[Part], number: int) -> list[Any]:
    """Some rows, the one of which least counts first: so that parts have unlike shares of what may be counted.

    Of two rows of which as much counts only one is taken, as long as there are others.
    """
    if not alone:
        return list(rows[:number])
    amounts = [_amounts(part.inputs) for part in alone]
    sizes = [sum(amount) for amount in amounts]
    some = [index for index, amount in enumerate(amounts) if all(amount)] or list(range(len(rows)))
    unlike = sorted({amounts[index]: index for index in reversed(some)}.values(), key=lambda index: sizes[index])
    if len(unlike) > number:  # the least and the most
        unlike = [*unlike[:_FIRST], *unlike[_FIRST - number :]] if number > _FIRST else unlike[-number:]
    others = [index for index in (*some, *range(len(rows))) if index not in unlike]
    chosen = list(dict.fromkeys([*unlike, *others]))[:number]
    return [rows[index] for index in sorted(chosen, key=lambda index: (index not in some, sizes[index]))]


def _amounts(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """How much of a row may count: the integers that aren't left out, what masks mark, the rows in lists."""
    amounts: list[int] = []
    for value in inputs.values():
        if isinstance(value, Tensor) and not value.is_floating_point():
            amounts.append(int((value != IGNORED).sum()))
        if _marks(value):
            amounts.append(int((value != 0).sum()))
        if isinstance(value, (list, tuple)):
            amounts += [len(tensor) for tensor in tensors_in(value) if tensor.ndim]
    return tuple(amounts)


def _marks(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.numel() < 1 << 16 and is_mask(value)


def _parts(first: Sequence[Any], rest: Sequence[Any], collate: Collator, here: str, there: str) -> Parts:
    together = here if here == there else "rows of data= and eval_data= together"
    return Parts(
        whole=Part(inputs=collate([*first, *rest]), rows=len(first) + len(rest), what=together),
        first=Part(inputs=collate(first), rows=len(first), what=here),
        rest=Part(inputs=collate(rest), rows=len(rest), what=there),
    )


def _check_collator(rows: Sequence[Any], collate: Collator, name: str) -> None:
    """Raise UserError for a collator that fails, or draws at random."""
    try:
        once, again = collate(rows), collate(rows)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the collator fails on the first rows ({described(error)}); use rows of the keys and shapes that it "
            "takes"
        ) from error
    if not equal(once, again):
        raise UserError(
            f"the collator ({name}) gives another batch for the same rows: it draws at random; use one that doesn't "
            "(such as mlm=False), on rows that were masked or changed beforehand"
        )
