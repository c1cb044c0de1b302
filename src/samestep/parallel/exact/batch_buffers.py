"""Buffers that a forward updates: after a step they have the values that one forward of the global batch gives.

A forward sees a micro-batch on one rank. Here the first forward of each micro-batch begins with the buffer's value
from before the step; after the step, the updated values are combined over micro-batches and ranks:

- mean: the average of the micro-batches' buffers, weighted by their samples. Exact if the forward updates the
  buffer by an affine function of a mean over its samples, such as `usage.lerp_(hits.mean(0), 0.1)`.
- sum: the buffer before the step plus what each forward added, such as `counts += hits.sum(0)`.
- alike: the value after any micro-batch, for updates that don't depend on the samples, such as the vectors of
  spectral norm (Miyato et al. 2018, section 2.1: a power iteration in each forward), which need not be named.

For a buffer b before the step and b_m after the forwards of micro-batch m with n_m samples, over all ranks:

    mean: b + sum_m n_m (b_m - b) / sum_m n_m          sum: b + sum_m (b_m - b)

computed in float64, in one all-reduce for all buffers. The result does not depend on how the batch is split, as long
as the forward updates the buffer as the mode says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.torch_internals.modules import SPECTRAL_NORM_VECTORS, SpectralNorm, own_buffers

Join = Literal["mean", "sum", "alike"]
_OF_TASKS = ("mean", "sum")  # values that the batch_buffers() of a task may have


def find_batch_buffers(model: nn.Module, joins: Mapping[str, str], layout: Layout) -> dict[str, Join]:
    """Find how each buffer of a model is combined, from the patterns of a task; includes spectral norm's vectors.

    Raises UserError for a wrong pattern or value, LayoutError if ranks have parts of a sample.
    """
    matched: dict[str, Join] = {}
    buffers = dict(model.named_buffers())
    for pattern, join in joins.items():
        if join not in _OF_TASKS:
            raise UserError(f'batch_buffers(): {pattern} is "{join}"; use {" or ".join(_OF_TASKS)}')
        names = [name for name in buffers if fnmatchcase(name, pattern)]
        if not names:
            examples = ", ".join([*list(buffers)[:5], *(["..."] if len(buffers) > 5 else [])]) or "none"
            raise UserError(f'batch_buffers(): the model has no buffer "{pattern}"; it has {examples}')
        for name in names:
            if join == "mean" and not buffers[name].is_floating_point():
                raise UserError(
                    f"batch_buffers(): {name} holds {str(buffers[name].dtype).removeprefix('torch.')}, which have no "
                    'mean; use "sum", or a buffer of floating-point numbers'
                )
            matched[name] = "mean" if join == "mean" else "sum"
    if matched and (layout.context > 1 or layout.sequence == "split"):
        raise LayoutError(
            f'layout "{layout}": the buffer {next(iter(matched))} is filled from whole samples (batch_buffers()), of '
            "which a rank here has some tokens; use dp, zero, fsdp, tp or pp"
        )
    matched |= dict.fromkeys((name for name in _power_iterations(model) if name not in matched), "alike")
    if layout.pipeline > 1:
        blocks = set(find_blocks(model))
        for name in matched:
            owner = model.get_submodule(name.rpartition(".")[0])
            # Each stage would update a copy of its own, from what its part of that forward does.
            if owner not in blocks and not blocks.isdisjoint(owner.modules()):
                raise LayoutError(
                    f'layout "{layout}": the buffer {name} (batch_buffers()) belongs to {type(owner).__name__}, '
                    "whose forward every stage runs a part of; keep it in a module of one stage, or use dp, zero, "
                    "fsdp or tp"
                )
    return matched


def _power_iterations(model: nn.Module) -> Iterator[str]:
    """The vectors of spectral norm."""
    for name, module in model.named_modules():
        if isinstance(module, SpectralNorm):
            yield from (f"{name}.{key}" for key in SPECTRAL_NORM_VECTORS if key in own_buffers(module))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The value of a buffer after a micro-batch's forwards on this rank."""

    after: Tensor
    samples: int  # 0 for zero-weight samples, which another rank counts


@dataclass(kw_only=True)
class _Joined:
    """One buffer, and its values in the running step on this rank."""

    join: Join
    before: Tensor | None = None  # the value before the step
    began: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by micro-batch and number of the forward
    made: dict[int, _Made] = field(default_factory=dict)  # by micro-batch, after its last forward

    @property
    def samples(self) -> int:
        return sum(call.samples for call in self.made.values())

    def moved(self, like: Tensor) -> Tensor:
        """The change of the buffer, summed over micro-batches, for a mean weighted by their samples. In float64."""
        total = torch.zeros_like(like, dtype=torch.float64)
        for call in self.made.values():
            assert self.before is not None
            weight = call.samples if self.join == "mean" else float(call.samples > 0)
            total += (call.after.double() - self.before.double()) * weight
        return total

    def forget(self) -> None:
        """Free the values after a step."""
        self.before = None
        self.began.clear()
        self.made.clear()


class BatchBuffers:
    """Combines a model's buffers over the forwards of a step.

    A micro-batch may run a module several times (a shared layer): the first of these calls begins with the buffer
    from before the step, further calls with the value after the call before. The value after the last one counts.
    """

    def __init__(
        self, model: nn.Module, joins: Mapping[str, Join], group: dist.ProcessGroup, forward_context: ForwardContext
    ) -> None:
        self.joins = joins
        self._group = group
        self._forward_context = forward_context
        self._places: list[tuple[nn.Module, dict[str, _Joined]]] = []
        # By the module that owns the buffer, whose forward updates it.
        for path, module in model.named_modules():
            own_names = {key: f"{path}.{key}" if path else key for key in own_buffers(module)}
            joined = {key: _Joined(join=joins[name]) for key, name in own_names.items() if name in joins}
            if joined:
                self._places.append((module, joined))
                # The forward is replaced rather than hooked, so that a recomputed block comes through here as well.
                vars(module)["forward"] = partial(self._forward, module.forward, path, module, joined)

    def _forward(
        self,
        forward: Callable[..., Any],
        path: str,
        module: nn.Module,
        joined: Mapping[str, _Joined],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Replacement of a module's forward, which in a training step begins with the buffers from before the step.

        Outside of training steps it calls the module's own forward unchanged.
        """
        moment = self._forward_context.moment
        if moment is None:
            return forward(*arguments, **keywords)
        number = self._forward_context.count(f"{path} (its buffers)")
        place = id(moment), number
        if self._forward_context.recomputing:
            return self._recompute(lambda: forward(*arguments, **keywords), module, joined, place)
        for key, buffer_join in joined.items():
            buffer = _buffer(module, key)
            buffer_join.before = buffer.clone() if buffer_join.before is None else buffer_join.before
            if number == 0:  # the first forward of a micro-batch; further ones continue from it
                buffer.copy_(buffer_join.before)
            buffer_join.began[place] = buffer.clone()
        try:
            return forward(*arguments, **keywords)
        finally:
            samples = 0 if moment.zero_weight else len(moment.samples)
            for key, buffer_join in joined.items():
                buffer_join.made[id(moment)] = _Made(after=_buffer(module, key).clone(), samples=samples)

    def _recompute(
        self,
        forward: Callable[[], Any],
        module: nn.Module,
        joined: Mapping[str, _Joined],
        place: tuple[int, int],
    ) -> Any:
        """Recompute a forward in backward with the buffers of the original one, and restore them afterwards."""
        buffers = {key: _buffer(module, key).clone() for key in joined}
        for key, buffer_join in joined.items():
            _buffer(module, key).copy_(buffer_join.began[place])
        try:
            return forward()
        finally:
            for key, values in buffers.items():
                _buffer(module, key).copy_(values)

    @torch.no_grad()
    def settle(self) -> None:
        """After the last backward of a step: set each buffer to the value combined over all forwards of all ranks."""
        held = [
            (_buffer(module, key), buffer_join)
            for module, joined in self._places
            for key, buffer_join in joined.items()
        ]
        for buffer, buffer_join in held:
            if buffer_join.join == "alike" and buffer_join.made:
                buffer.copy_(next(iter(buffer_join.made.values())).after)
        self._sum([(buffer, buffer_join) for buffer, buffer_join in held if buffer_join.join != "alike"])
        for _, buffer_join in held:
            buffer_join.forget()

    def _sum(self, held: Sequence[tuple[Tensor, _Joined]]) -> None:
        """Combine the buffers of modes mean and sum over the micro-batches of all ranks."""
        if not held:
            return
        moved = [
            buffer_join.moved(buffer) for buffer, buffer_join in held
        ]  # [buffers] of the buffers' shapes, float64
        # Numbers of samples stay on the device, so that the host does not wait for the all-reduce.
        samples = [moved[0].new_full((1,), buffer_join.samples) for _, buffer_join in held]
        message = torch.cat([*samples, *(part.flatten() for part in moved)])  # [buffers + all their numbers]
        dist.all_reduce(message, group=self._group)
        counts, *sums = message.split([len(held), *(part.numel() for part in moved)])
        for (buffer, buffer_join), total, count in zip(held, sums, counts.unbind(), strict=True):
            before = buffer if buffer_join.before is None else buffer_join.before
            change = total.view_as(buffer) / (count.clamp(min=1) if buffer_join.join == "mean" else 1)
            # A buffer whose module no rank called stays unchanged.
            buffer.copy_(torch.where(count > 0, before.double() + change, buffer.double()).to(buffer.dtype))


def _buffer(module: nn.Module, key: str) -> Tensor:
    """A module's own buffer, by its key. Buffers that are None are not joined."""
    buffer = own_buffers(module)[key]
    assert buffer is not None
    return buffer
