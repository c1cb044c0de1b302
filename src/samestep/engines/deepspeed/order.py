"""ZeRO 3 gathers a layer's parameters when it runs, so all ranks must run the same layers in the same order."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import UserError

_END = -1  # of a forward, where others run one layer more


class SameOrder:
    """Refuses a forward in which ranks would wait for each other for ever, before it gathers anything.

    In the first forward the ranks agree on each layer by a message. All that follow must run what the first one
    ran, which each rank sees for itself. To be made before DeepSpeed puts its own hooks on the layers.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._names: list[str] = []
        self._orders: dict[bool, list[int]] = {}  # of training, and of evaluation
        self._running: list[int] | None = None  # the layers of this forward so far
        self._training = True
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._run, len(self._names)))
                self._names.append(name)

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """A forward of this rank, while others do theirs."""
        self._running, self._training = [], training
        try:
            yield
            self._go_on(_END)
            self._orders.setdefault(training, self._running)
        finally:
            self._running = None

    def _run(self, number: int, module: nn.Module, arguments: Any) -> None:
        if self._running is not None:
            self._go_on(number)
            self._running.append(number)

    def _go_on(self, number: int) -> None:
        """Raise UserError where this rank is about to run another layer than it should."""
        assert self._running is not None
        order = self._orders.get(self._training)
        if order is None:
            both = torch.tensor([number, -number], device=self._device)
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            alike = bool(both.sum() == 0)
        else:
            expected = order[len(self._running)] if len(self._running) < len(order) else _END
            alike = number == expected
        if not alike:
            what = "ends" if number == _END else f"runs {self._names[number] or 'the model'}"
            others = "other ranks" if order is None else "the first forward"
            raise UserError(
                f"engine deepspeed: a forward {what} where {others} did not, and ZeRO 3 gathers a layer's parameters "
                "from all ranks when it runs, so they would wait for ever; layout dp, or a model that runs the same "
                "layers in every forward, would do"
            )
