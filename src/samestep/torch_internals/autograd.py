"""Where the autograd engine is in a backward, and a backward in two halves."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable


def is_in_backward() -> bool:
    """Whether this thread runs a backward: autograd numbers its graph tasks, and says -1 outside of one."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Call a function when the running backward has computed all gradients; only valid within a backward.

    Callbacks are called in the order in which they were queued, among them DDP's own.
    """
    Variable._execution_engine.queue_callback(callback)


def backward_of_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> Any:
    """Compute the gradients of inputs, and return what `backward_of_weights` computes the others from.

    It is what PyTorch's own schedules of pipelines use. It detaches the roots in place, which fails for views and for
    roots from which others are computed.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    _, groups = stage_backward_input(list(roots), list(gradients), list(inputs), iter(weights))
    return groups


def backward_of_weights(weights: Iterable[nn.Parameter], groups: Any) -> None:
    """Compute the gradients of weights from what `backward_of_inputs` returned.

    The graph is retained, since groups may share nodes, such as of a tensor that all layers use. It is freed with
    the groups.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), groups, retain_graph=True)
