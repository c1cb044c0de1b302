"""Buffers that every training forward moves on, such as spectral norm's vectors, where a step runs several forwards.

One process runs each module once for the whole batch. Micro-batches, pipelines and recomputation run it more often,
and such a buffer would then be further on than one process has it.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import UserError


class RepeatedForwards:
    """Watches buffers while a step, the first one, runs modules that have run in it before."""

    def __init__(self, model: nn.Module, joined: Collection[str] = ()) -> None:
        """`joined`: buffers that are joined over the forwards of a step, however many there are."""
        self._model = model
        self._joined = joined
        self._moved: list[str] = []
        self._done = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forwards of modules that have run in this step before, and around their recomputation."""
        if self._done:
            yield
            return
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if name not in self._joined}
        yield
        for name, buffer in self._model.named_buffers():
            values = before.get(name)
            # A cache that another size of inputs makes anew, or that is made late, is no state of the training.
            if values is not None and values.shape == buffer.shape and not _equal(values, buffer):
                self._moved.append(name)

    def check(self, why: str) -> None:
        """Raise UserError, on every rank alike, where a buffer has moved. Every rank asks, when a step is done."""
        if self._done:
            return
        self._done = True
        names: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self._moved[0] if self._moved else None)
        moved = next((name for name in names if name is not None), None)
        if moved is not None:
            owner = moved.rpartition(".")[0]
            raise UserError(
                f"the buffer {moved} is moved on by every training forward of {owner or 'the model'}, and {why}; "
                "one process runs one forward a step, so use one micro-batch a rank (run.micro_batch: null), no "
                "recompute and no pp, such as dp2 or fsdp2; where the buffer is a mean or a sum over the batch, have "
                f'the task\'s batch_buffers() give {{"{moved}": "mean"}} or "sum"'
            )


def _equal(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and torch.equal(before.nan_to_num(), after.detach().nan_to_num())
