"""The exchange of rows between ranks, each as many to each other rank as it has for it, as backward knows it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows [sum(receive), ...] that the ranks of a group have for this one, in the order of the ranks.

    `rows` [sum(send), ...]: those for rank 0 first. Backward sends every gradient back to where its row came from.
    """
    return _Exchange.apply(rows, list(send), list(receive), group)  # pyright: ignore[reportReturnType]


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What every rank of a group says to this one: [ranks, ...] from [ranks, ...], one row for each."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


class _Exchange(torch.autograd.Function):
    """Every rank runs it in every forward and in every backward, also with no row to send and none to receive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        """All-to-all of rows; backward is the same with the counts exchanged."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        # Recomputation ends once it has all tensors that backward wants. Where experts have no row here they want
        # none, and this rank would leave the exchange out.
        ctx.save_for_backward(rows.new_empty(0))
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Rows' gradients go back to the ranks that sent the rows, also where there are none."""
        _ = ctx.saved_tensors
        return exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None
