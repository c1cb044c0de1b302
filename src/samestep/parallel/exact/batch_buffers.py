"""Buffers that a forward fills with a mean or a sum over its samples: what one process makes of the global batch.

A forward sees a micro-batch on one rank. Here each forward of a step begins with the buffer as it was before the
step; when the step is over, what they made of it is joined over micro-batches and ranks:

- mean: the average of the forwards' buffers, weighted by their samples. Exact where the forward moves the buffer by
  an affine function of a mean over its samples, such as `usage.lerp_(hits.mean(0), 0.1)`.
- sum: the buffer before the step plus what each forward added, such as `counts += hits.sum(0)`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.blocks import find_blocks
from samestep.parallel.exact.forward_context import ForwardContext

Join = Literal["mean", "sum"]


def find_batch_buffers(model: nn.Module, given: Mapping[str, str], layout: Layout) -> dict[str, Join]:
    """How each named buffer of a whole model is joined, by the patterns of a task.

    Raises UserError for a wrong pattern or value, LayoutError where ranks have parts of a sample.
    """
    found: dict[str, Join] = {}
    buffers = dict(model.named_buffers())
    for pattern, join in given.items():
        if join not in get_args(Join):
            raise UserError(f'batch_buffers(): {pattern} is "{join}"; use {" or ".join(get_args(Join))}')
        names = [name for name in buffers if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join([*list(buffers)[:5], *(["..."] if len(buffers) > 5 else [])]) or "none"
            raise UserError(f'batch_buffers(): the model has no buffer "{pattern}"; it has {known}')
        for name in names:
            if join == "mean" and not buffers[name].is_floating_point():
                raise UserError(
                    f"batch_buffers(): {name} holds {str(buffers[name].dtype).removeprefix('torch.')}, which have no "
                    'mean; use "sum", or a buffer of floating-point numbers'
                )
            found[name] = "mean" if join == "mean" else "sum"
    if found and (layout.context > 1 or layout.sequence == "split"):
        raise LayoutError(
            f'layout "{layout}": the buffer {next(iter(found))} is filled from whole samples (batch_buffers()), of '
            "which a rank here has some tokens; use dp, zero, fsdp, tp or pp"
        )
    if layout.pipeline > 1:
        found |= dict.fromkeys(_power_iterations(model), "mean")
        blocks = set(find_blocks(model))
        for name in found:
            owner = model.get_submodule(name.rpartition(".")[0])
            if owner not in blocks and not blocks.isdisjoint(owner.modules()):
                raise LayoutError(
                    f'layout "{layout}": the buffer {name} (batch_buffers()) belongs to {type(owner).__name__}, '
                    "whose forward every stage runs a part of; keep it in a module of one stage, or use dp, zero, "
                    "fsdp or tp"
                )
    return found


def _power_iterations(model: nn.Module) -> Iterator[str]:
    """The vectors of spectral norm, which every micro-batch moves alike: their mean is what one forward makes."""
    for name, module in model.named_modules():
        if isinstance(module, parametrizations._SpectralNorm):
            yield from (f"{name}.{key}" for key in ("_u", "_v") if key in module._buffers)


@dataclass(kw_only=True)
class _Joined:
    """One buffer, and what the forwards of the running step made of it on this rank."""

    join: Join
    before: Tensor | None = None  # as it was before the step
    moved: Tensor | None = None  # the sum of what forwards added to it, weighted, in float64
    samples: float = 0.0


class BatchBuffers:
    """The buffers of a model that are joined over the forwards of a step."""

    def __init__(
        self, model: nn.Module, joins: Mapping[str, Join], group: dist.ProcessGroup, now: ForwardContext
    ) -> None:
        self.joins = joins
        self._group = group
        self._now = now
        self._places: list[tuple[nn.Module, dict[str, _Joined]]] = []
        for path, module in model.named_modules():
            mine = {key: f"{path}.{key}" if path else key for key in module._buffers}
            joined = {key: _Joined(join=joins[name]) for key, name in mine.items() if name in joins}
            if joined:
                self._places.append((module, joined))
                # The forward is replaced rather than hooked, so that a recomputed block comes through here as well.
                vars(module)["forward"] = partial(self._forward, module.forward, module, joined)

    def _forward(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        joined: Mapping[str, _Joined],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        moment = self._now.moment
        if moment is None:
            return forward(*arguments, **keywords)
        found = {key: _buffer(module, key).clone() for key in joined}
        for key, each in joined.items():
            each.before = found[key] if each.before is None else each.before
            _buffer(module, key).copy_(each.before)
        try:
            return forward(*arguments, **keywords)
        finally:
            for key, each in joined.items():
                if self._now.recomputing:
                    _buffer(module, key).copy_(found[key])
                else:
                    _add(each, _buffer(module, key), 0 if moment.lent else len(moment.samples))

    @torch.no_grad()
    def settle(self) -> None:
        """After the last backward of a step: give each buffer what all forwards of all ranks made of it."""
        held = [(_buffer(module, key), each) for module, joined in self._places for key, each in joined.items()]
        if not held:
            return
        moved = [
            torch.zeros_like(buffer, dtype=torch.float64) if each.moved is None else each.moved
            for buffer, each in held
        ]
        samples = torch.tensor([each.samples for _, each in held], dtype=torch.float64, device=moved[0].device)
        message = torch.cat([samples, *(part.flatten() for part in moved)])
        dist.all_reduce(message, group=self._group)
        samples, *sums = message.split([len(held), *(part.numel() for part in moved)])
        for (buffer, each), total, count in zip(held, sums, samples.tolist(), strict=True):
            if count:
                before = buffer if each.before is None else each.before
                change = total.view_as(buffer) / (count if each.join == "mean" else 1)
                buffer.copy_((before.double() + change).to(buffer.dtype))
            each.before, each.moved, each.samples = None, None, 0.0


@torch.no_grad()
def _add(joined: _Joined, after: Tensor, samples: int) -> None:
    """Note what a forward of so many samples made of a buffer."""
    assert joined.before is not None
    change = after.double() - joined.before.double()
    change *= samples if joined.join == "mean" else float(samples > 0)
    joined.moved = change if joined.moved is None else joined.moved + change
    joined.samples += samples


def _buffer(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer
