"""Stacked experts: one module with the weights of all experts, called with tokens, their experts and their weights.

transformers has them so: `experts(hidden, index, weights)`. A rank holds a part of each weight's first dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.parallel.collectives import all_to_all
from samestep.parallel.unused_parameters import depending
from samestep.torch_internals import pytree

Key = int | str  # of an argument: its position, or its name


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The position or name of each argument of a call."""

    tokens: Key  # [..., features]
    experts: Key  # [..., chosen], whole numbers: the experts of each token
    weights: Key  # [..., chosen]: factors of the experts' outputs

    @classmethod
    def of(cls, arguments: tuple[Any, ...], keywords: dict[str, Any], experts: int) -> "Arguments | None":
        """Identify a call's arguments; None if it has others, or an expert index is out of range."""
        arguments_by_key: dict[Key, Tensor] = {
            key: value
            for key, value in [*enumerate(arguments), *keywords.items()]
            if isinstance(value, Tensor) and value.ndim
        }
        chosen = [key for key, value in arguments_by_key.items() if value.dtype in (torch.int32, torch.int64)]
        if len(arguments_by_key) != 3 or len(chosen) != 1:
            return None
        index = arguments_by_key[chosen[0]]
        if not index.numel() or int(index.min()) < 0 or int(index.max()) >= experts:
            return None
        rest = [key for key in arguments_by_key if key != chosen[0] and arguments_by_key[key].is_floating_point()]
        weights = [key for key in rest if arguments_by_key[key].shape == index.shape]
        tokens = [key for key in rest if key not in weights and arguments_by_key[key].ndim > 1]
        if len(weights) != 1 or len(tokens) != 1:
            return None
        leading = arguments_by_key[tokens[0]].shape[:-1]
        if index.shape[: len(leading)] != leading or index.ndim > len(leading) + 1:
            return None
        return cls(tokens=tokens[0], experts=chosen[0], weights=weights[0])


class StackedExperts:
    """Replaces the forward of a module of stacked experts, of which this rank holds a part."""

    def __init__(self, module: nn.Module, arguments: Arguments, *, local: int, group: dist.ProcessGroup) -> None:
        """`local`: experts that each rank of the group holds."""
        self._module = module
        self._arguments = arguments
        self._local = local
        self._group = group
        self._inner: Callable[..., Any] = module.forward
        vars(module)["forward"] = self.forward

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute `module(tokens, experts, weights)` over all ranks: for each token the sum over its experts."""
        passed: dict[Key, Any] = {**dict(enumerate(arguments)), **keywords}
        names = self._arguments
        tokens, chosen, weights = passed[names.tokens], passed[names.experts], passed[names.weights]
        rows = tokens.reshape(-1, tokens.shape[-1])  # [tokens, features]
        flat = chosen.reshape(-1)  # [tokens * chosen]
        ranks = dist.get_world_size(self._group)
        # transformers marks an unused choice by an index after the last expert.
        # [tokens * chosen]: the rank of the chosen expert; `ranks` for none.
        owner = torch.where(flat < ranks * self._local, flat // self._local, ranks)
        # Pairs of (token, choice) in the order of ranks; stable, so that the order of summation is deterministic.
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=ranks + 1)[:ranks]  # [ranks]: rows for each
        send, receive = counts.tolist(), all_to_all(counts, self._group).tolist()
        order = order[: sum(send)]
        source = order // max(1, flat.numel() // max(1, len(rows)))  # of each row, the token
        made = self._compute(
            all_to_all(rows[source], self._group, send, receive),
            all_to_all((flat % self._local)[order], self._group, send, receive),
            all_to_all(weights.reshape(-1)[order], self._group, send, receive),
            passed,
        )
        back = all_to_all(made, self._group, receive, send)  # [rows sent, features of the output]
        # [tokens, features of the output]: for each token the sum over its choices, already times their weights.
        total = back.new_zeros(len(rows), *back.shape[1:]).index_add(0, source, back)
        return total.reshape(*tokens.shape[:-1], *back.shape[1:])

    def _compute(self, rows: Tensor, experts: Tensor, weights: Tensor, passed: dict[Key, Any]) -> Tensor:
        """Apply this rank's experts to rows of any rank, one expert for each row: [rows, features of the output]."""
        count, received = len(rows), [rows, weights]
        if not count:  # a dummy row, whose unused output gives the weights a zero gradient
            rows, weights, experts = rows.new_ones(1, rows.shape[1]), weights.new_ones(1), experts.new_zeros(1)
        names = self._arguments
        for key, row in ((names.tokens, rows), (names.experts, experts), (names.weights, weights)):
            like = passed[key]
            # One token each, of as many dimensions as the module is called with.
            shape = [len(row), *[1] * (like.ndim - 2), like.shape[-1] if key == names.tokens else 1]
            passed[key] = row.reshape(shape if like.ndim > 1 else [len(row)])
        made = self._inner(
            *(value for key, value in passed.items() if isinstance(key, int)),
            **{key: value for key, value in passed.items() if isinstance(key, str)},
        )
        made = made.reshape(len(rows), made.shape[-1])[:count]
        return depending(made, received) if not count and made.requires_grad else made


def shrink(module: nn.Module, experts: int, local: int) -> None:
    """Set a module's attributes with the number of experts to the local number."""
    for name, value in vars(module).items():
        if type(value) is int and value == experts and "expert" in name:
            vars(module)[name] = local


def is_output(output: Any, tokens: Tensor) -> bool:
    """Whether a module's output is one vector for each token."""
    return (
        isinstance(output, Tensor)
        and len(pytree.tree_leaves(output)) == 1
        and output.shape[:-1] == tokens.shape[:-1]
        and output.is_floating_point()
    )
