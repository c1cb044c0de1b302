"""Checks of a model before its first step: that a layout can train it, and that all ranks have built the same one.

`check_model` and `check_memory` refuse models that no layout can train, `materialize` gives lazy layers their shapes,
and `check_same_task` compares the tasks that the ranks have built from the same arguments.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from samestep.data.loader import to_device
from samestep.data.sample_draws import sample_of
from samestep.data.types import Samples
from samestep.errors import UserError, described
from samestep.parallel.valueless import has_values
from samestep.tasks.base import call
from samestep.torch_internals.modules import is_compiled

_SPARSE = (nn.Embedding, nn.EmbeddingBag)
_WRAPPERS = (DataParallel, DistributedDataParallel)


def check_model(model: Any, what: str) -> None:
    """Raise UserError if `model` is not a plain module or can't be trained. `what`: its origin, for messages."""
    if not isinstance(model, nn.Module):
        result = "None" if model is None else f"a {type(model).__name__}"
        raise UserError(f"{what} gave {result}; use an nn.Module, a new one in each call")
    if is_compiled(model):
        raise UserError(f"{what} gave a module that torch.compile made; use the module itself, and run.compile: true")
    for name, module in model.named_modules():
        which = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, _WRAPPERS):
            raise UserError(f"{what}: {which} is wrapped for several processes or devices; use its .module")
        if isinstance(module, _SPARSE) and module.sparse:
            raise UserError(
                f"{what}: {which} has sparse gradients, which are neither clipped nor sharded; use sparse=False"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{what}: the model has no parameter that needs a gradient; use requires_grad=True for some")


def check_memory(model: nn.Module, what: str) -> None:
    """Raise UserError for a parameter or buffer on the meta device, which has no values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise UserError(f"{what}: {name} is on the meta device, and has no values; use a model built on the CPU")


def lazy_modules(model: nn.Module) -> list[str]:
    """The modules that get their shapes in the first forward, each as "name (type)"."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]


def materialize(model: nn.Module, inputs_of: Callable[[], Any], what: str) -> None:
    """Give lazy layers their shapes by one forward; their values are drawn from torch's generator.

    The forward is in evaluation mode, so statistics don't change and dropout draws no numbers. Raises UserError if
    the forward fails, or a layer has no shape after it. `what`: the model's origin, for messages.
    """
    lazy = lazy_modules(model)
    if not lazy:
        return
    training = [module for module in model.modules() if module.training]
    inputs = to_device(inputs_of(), torch.device("cpu"), torch.float32)
    try:
        with torch.no_grad():
            call(model.eval(), inputs)
    except Exception as error:
        raise UserError(
            f"{what}: {lazy[0]} gets its shape in a first forward, which fails ({described(error)}); use layers that "
            "are given their sizes"
        ) from error
    finally:
        model.eval()
        for module in training:
            module.training = True
    if left := lazy_modules(model):
        raise UserError(
            f"{what}: {left[0]} has no shape after a forward of the first samples; use layers that are given their "
            "sizes"
        )


_ELEMENTS = 4096  # elements of a tensor that are compared


def check_same_task(samples: Samples, model: nn.Module) -> None:
    """Raise UserError, on every rank, if a rank has other samples or other initial weights than rank 0.

    Compares the number of samples, the first and the last of them, and the parameters and buffers with values. The
    usual causes are a generator without a seed and the order of a set of strings, which differ between processes. A
    collective: every rank must call it.
    """
    if dist.get_world_size() == 1:
        return
    digests = {"": _digest(len(samples))}
    ends = (0, len(samples) - 1) if len(samples) else ()
    digests |= {f"train_set()[{index}]": _digest(sample_of(samples, index)) for index in ends}
    tensors = (*model.named_parameters(), *model.named_buffers())
    digests |= {f"model(): {name}": _digest(tensor) for name, tensor in tensors if _has_values(tensor)}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, digests)
    for rank, its in enumerate(ranks):
        if its.keys() != ranks[0].keys() or its[""] != ranks[0][""]:
            raise UserError(f"rank {rank} has built another task than rank 0{_FIX}")
        for what, digest in its.items():
            if digest != ranks[0][what]:
                raise UserError(f"{what} is another one on rank {rank} than on rank 0{_FIX}")


_FIX = (
    "; every rank builds the task by itself, so use PyTorch's generator in model(), generators with a seed "
    "elsewhere, and sorted(...) of sets"
)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and has_values(tensor)


def _digest(value: Any) -> str:
    """A hash of a nest of numbers, tensors and names, the same in every process."""
    hasher = hashlib.sha256()
    _add(hasher, value)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    """Add a nest of values to a digest; of values that are no tensor, number or text, only the type."""
    if isinstance(value, Tensor):
        hasher.update(f"{tuple(value.shape)} {value.dtype}".encode())
        if value.layout is torch.strided and not value.is_meta:
            flat = value.detach().reshape(-1)
            few = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
            hasher.update(torch.view_as_real(few).numpy().tobytes() if few.is_complex() else _bytes(few))
    elif isinstance(value, Mapping):
        for key in value:
            hasher.update(f"{key}:".encode())
            _add(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{len(value)}:".encode())
        for inner in value:
            _add(hasher, inner)
    elif isinstance(value, (bool, int, float, complex, str, bytes)):
        hasher.update(repr(value).encode())
    elif type(value).__module__ == "numpy":
        hasher.update(value.tobytes() if value.dtype != object else b"objects")
    else:
        hasher.update(type(value).__name__.encode())


def _bytes(few: Tensor) -> bytes:
    return few.view(torch.uint8).numpy().tobytes() if few.numel() else b""
