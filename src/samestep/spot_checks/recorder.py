"""SpotChecks: records every k-th step of a training on one rank. It sends nothing, draws nothing and changes nothing.

Between the recorded steps only two hooks of the optimizer are called. In a recorded step each parameter is read four
times: its gradient from this rank's loss, the gradient that the optimizer steps by, and the weight before and after.
"""

import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.recording.samples import random_state, rows_of
from samestep.recording.shards import buffers_of, named_modules, parts_of, unwrapped
from samestep.script_proof.own_gradients import clipped_by
from samestep.spot_checks.fingerprints import NUMBERS, Projection, fingerprint
from samestep.spot_checks.records import CheckedStep, Fingerprints, file_of, line_of, starts_in
from samestep.torch_internals.modules import AnyBatchNorm
from samestep.torch_internals.sharded import DTensor

Reduction = Literal["mean", "sum"]


class SpotChecks:
    """Records the first step of an optimizer, and every k-th one after it, until `close`.

    Args:
        folder: for the records; each rank writes a file there. A resumed training adds to them.
        model: as it is trained: after DDP, Accelerate and the like have wrapped it.
        optimizer: one of PyTorch's, or a wrapper around it.
        every: the number of steps from one recorded step to the next.
        scaler: the GradScaler, where there is one; Accelerate's is found.
        reduction: what the gradients after the reduction are to be of ranks' own: `"sum"` where each rank's loss is
            its share of the whole batch's.

    Raises:
        UserError: for a model and an optimizer that have no parameter in common, and for wrong values.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Any,
        *,
        every: int = 100,
        scaler: Any = None,
        reduction: Reduction = "mean",
    ) -> None:
        if every < 1:
            raise UserError(f"SpotChecks(every={every}): a step in how many is recorded? use 100, or 1 for each")
        if reduction not in ("mean", "sum"):
            raise UserError(f'SpotChecks(reduction={reduction!r}): use "mean", or "sum"')
        self._every, self._reduction = every, reduction
        self._scaler = scaler if scaler is not None else getattr(optimizer, "scaler", None)
        self._optimizer = _innermost(optimizer)
        self._model = unwrapped(model)
        self._named, self._left_out = _whole_parameters(model, self._optimizer)
        self._projections: dict[torch.device, Projection] = {}
        self._rank, self._world_size = _place()
        self._file = file_of(Path(folder), self._rank)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._start = starts_in(self._file)
        self._step = 0
        self._recording: _Recording | None = None
        self._handles: list[Any] = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        # Hooks and this object hold one another. Left so at the end of the process, they would keep parameters, and
        # by them DDP's process group, until its threads can't be joined any more, which aborts the process.
        atexit.register(_close, weakref.ref(self))
        self._begin()

    def close(self) -> None:
        """Record nothing more."""
        self._end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._named = {}

    def _begin(self) -> None:
        """Listen until the next step of the optimizer is over."""
        self._recording = _Recording(self._model, self._named, self._project)

    def _end(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _project(self, tensor: Tensor) -> Tensor:
        """Project a tensor where it is; on the CPU, if its device has no float64."""
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.device not in self._projections:
            try:
                self._projections[tensor.device] = Projection(tensor.device)
            except TypeError:
                self._projections[tensor.device] = Projection(torch.device("cpu"))
        projection = self._projections[tensor.device]
        return projection.of(tensor.to(projection.device))

    def _before_step(self, *_: Any) -> None:
        self._step += 1
        if self._recording is not None:
            self._recording.read_before()

    def _after_step(self, *_: Any) -> None:
        if self._recording is not None:
            step = self._noted(self._recording)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line_of(step))
            self._end()
        if self._step % self._every == 0:
            self._begin()

    def _noted(self, recording: "_Recording") -> CheckedStep:
        recording.stop()
        return CheckedStep(
            start=self._start,
            step=self._step,
            rank=self._rank,
            world_size=self._world_size,
            reduction=self._reduction,
            scale=float(self._scaler.get_scale()) if self._scaler is not None else 1.0,
            clipped=recording.clipping.factor(),
            settings=[_numbers_of(group) for group in self._optimizer.param_groups],
            rows=recording.rows,
            counts=recording.counts,
            random_state=random_state(),
            batch_norms=[name for name, module in named_modules(self._model) if _follows_rows(module)],
            before=_read(recording.before),
            after=_read({name: self._project(parameter) for name, parameter in self._named.items()}),
            buffers=_read({name: self._project(buffer) for name, buffer in _moving_buffers(self._model)}),
            own=_read(recording.own),
            reduced=_read(recording.reduced),
            left_out=self._left_out,
        )


class _Recording:
    """Listens to one step: the rows of its forwards, and the gradients that its backwards give."""

    def __init__(
        self, model: nn.Module, named: Mapping[str, nn.Parameter], project: Callable[[Tensor], Tensor]
    ) -> None:
        self._named, self._project = named, project
        self.rows: list[str] = []
        self.counts: dict[str, int] = {}
        self.before: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        self.reduced: dict[str, Tensor] = {}
        self.clipping = _Clipping()
        self._handles = [model.register_forward_pre_hook(self._forward, with_kwargs=True)]
        self._handles += [parameter.register_hook(self._adding(name, parameter)) for name, parameter in named.items()]

    def stop(self) -> None:
        self.clipping.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read_before(self) -> None:
        """Read what the optimizer's step is about to use."""
        for name, parameter in self._named.items():
            self.before[name] = self._project(parameter)
            if parameter.grad is not None:
                self.reduced[name] = self._project(parameter.grad)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if all(parameter.grad is None for parameter in self._named.values()):
            self.rows, self.counts = [], {}  # what came before was never stepped
        rows = rows_of(args, kwargs)
        if rows is None:
            return
        for hashes in zip(*rows.hashes.values(), strict=True):
            self.rows.append(blake2b("".join(hashes).encode(), digest_size=8).hexdigest())
        for name, count in rows.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def _adding(self, name: str, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            projected = self._project(gradient)
            before = self.own.get(name)
            if before is None or parameter.grad is None:
                self.own[name] = projected
            else:
                # Where `parameter.grad` was set to zero the sum begins again. The device decides, without a wait.
                goes_on = parameter.grad.ne(0).any().to(before.device)
                self.own[name] = projected + torch.where(goes_on, before, torch.zeros_like(before))

        return add


class _Clipping:
    """Hears by how much gradients are clipped, in PyTorch's function, in both of its places."""

    def __init__(self) -> None:
        self._factors: list[tuple[Any, Any]] = []
        self._active = True
        self._call = clip_grad.clip_grad_norm_

        @wraps(self._call)
        def clip(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            norm = self._call(parameters, max_norm, *args, **kwargs)
            if self._active:
                self._factors.append((norm, max_norm))
            return norm

        self._heard = clip
        _set_clip(clip)

    def stop(self) -> None:
        """Put back what was there; what another one has put around it meanwhile stays, and calls it."""
        self._active = False
        if clip_grad.clip_grad_norm_ is self._heard:
            _set_clip(self._call)

    def factor(self) -> float:
        result = 1.0
        for norm, limit in self._factors:
            result *= clipped_by(float(norm), float(limit))
        return result


def _set_clip(function: Any) -> None:
    clip_grad.clip_grad_norm_ = function
    nn.utils.clip_grad_norm_ = function


def _innermost(optimizer: Any) -> Optimizer:
    """PyTorch's own optimizer in the wrappers of Accelerate and Lightning."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"SpotChecks(optimizer={type(optimizer).__name__}): this is no optimizer of torch.optim, nor around one"
        )
    return optimizer


def _whole_parameters(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, nn.Parameter], int]:
    """The optimizer's parameters that each rank holds whole, by name, and the number of the others."""
    parts = parts_of({"": model})
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = [(parts[id(parameter)], parameter) for parameter in stepped if id(parameter) in parts]
    if not known:
        raise UserError(
            "SpotChecks: the optimizer has no parameter of this model; give it the model that is trained and its "
            "optimizer, after both were wrapped"
        )
    whole = {
        some[0].name: parameter
        for some, parameter in known
        if len(some) == 1 and some[0].offset is None and some[0].start is None and parameter.requires_grad
    }
    return whole, len(known) - len(whole)


def _close(reference: "weakref.ref[SpotChecks]") -> None:
    checks = reference()
    if checks is not None:
        checks.close()


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the settings of a parameter group."""
    numbers: dict[str, float] = {}
    for name, value in group.items():
        values = value if isinstance(value, (tuple, list)) and name != "params" else [value]
        for place, one in enumerate(values):
            if isinstance(one, (int, float)) or (isinstance(one, Tensor) and one.numel() == 1):
                numbers[f"{name}.{place}" if len(values) > 1 else name] = float(one)
    return numbers


def _follows_rows(module: nn.Module) -> bool:
    """Whether a module takes the statistics of this rank's own rows."""
    return isinstance(module, AnyBatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _moving_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in buffers_of({"": model}):
        if buffer.is_floating_point() and not isinstance(buffer, DTensor):
            yield name, buffer


def _read(projected: Mapping[str, Tensor]) -> Fingerprints:
    """Read the numbers of many tensors; all of a device are waited for at once."""
    names = list(projected)
    if not names:
        return {}
    joined = torch.stack([projected[name].cpu() for name in names])  # [tensors, NUMBERS + 1]
    assert joined.shape[1] == NUMBERS + 1
    return {name: fingerprint(row) for name, row in zip(names, joined, strict=True)}
