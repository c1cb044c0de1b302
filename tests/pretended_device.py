"""A pretended accelerator: a device of PyTorch's, "pretend", with the host's memory, whose operators run.

It is as strict as a real one. A tensor on the CPU beside one on the device raises. Whatever would make the host wait
for the device is noted with the place in samestep that asked for it: a value that is read, a size that depends on
values, a copy that blocks. Memory that FSDP has freed is overwritten. Random numbers come from a generator of the
device's own. Collectives run over gloo, so ranks exchange true numbers, and what they compute can be held against
one process.

PyTorch calls `_run` for every operator on the device that isn't composed of others. It looks at the same memory as
tensors on the CPU, runs the operator there, and gives what comes out back as tensors on the device.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import samestep

NAME = "pretend"
SOURCE = str(Path(samestep.__file__).parent)

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten

# Operators whose result has a size, or is a Python value, that depends on numbers: the host must see those first.
_READS_VALUES = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
    "aten::_assert_async",
}
# A real device copies indices that lie on the CPU by itself, and waits for that.
_TAKES_INDICES = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


class Waits:
    """Where the host waited for the device: "file:function (operator)", as often as it did."""

    def __init__(self) -> None:
        self.places: list[str] | None = None

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        """The list that is filled meanwhile."""
        before, self.places = self.places, []
        try:
            yield self.places
        finally:
            self.places = before

    def add(self, what: str) -> None:
        if self.places is not None:
            self.places.append(f"{_asked_by()} ({what})")


WAITS = Waits()
HANDING_ON = ("_answer", "__torch_function__")  # of modes


def _asked_by() -> str:
    """The innermost place in samestep of the call that goes on: "parallel/zero1.py:settle".

    What a mode hands on, such as that of dropout, is asked by the caller, if that is samestep's.
    """
    frame = _in_samestep(sys._getframe(1))
    if frame is None:
        return "backward" if threading.current_thread() is not threading.main_thread() else "elsewhere"
    caller = frame
    while caller is not None and caller.f_code.co_name in HANDING_ON:
        caller = caller.f_back
    if caller is not None and caller is not frame and _is_samestep(caller):
        frame = caller
    return f"{frame.f_code.co_filename[len(SOURCE) + 1 :]}:{frame.f_code.co_name}"


def _in_samestep(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of samestep's."""
    while frame is not None and not _is_samestep(frame):
        frame = frame.f_back
    return frame


def _is_samestep(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(SOURCE)


class _Stream:
    """Work runs at once, so streams and events have nothing to order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _current()

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        WAITS.add("synchronize")

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> None: ...
    def wait(self, _: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.add("synchronize")

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Module:
    """What `torch.pretend` is, after `torch.cuda`."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self.generator = torch.Generator()  # of the device's random numbers

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, _: Any) -> None: ...
    def device_count(self) -> int:
        return 1

    def get_device_name(self, _: Any = None) -> str:
        return "a pretended accelerator"

    def device(self, _: Any) -> Any:
        return nullcontext()

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def current_stream(self, _: Any = None) -> _Stream:
        return _Stream()

    def synchronize(self, _: Any = None) -> None:
        WAITS.add("synchronize")

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = None) -> None:
        self.generator.set_state(new_state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


MODULE = _Module()


def _current() -> torch.device:
    return torch.device(NAME, 0)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _new(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """The device's storage whose memory is `host`."""
    storage: Any = torch._C._construct_storage_from_data_pointer(host.data_ptr(), _current(), host.nbytes())
    return storage


def _tensor(storage: Any, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    empty: Any = torch._C._acc  # pyright: ignore[reportAttributeAccessIssue]
    made: Tensor = empty.create_empty_tensor([0], dtype)
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU, made, storage, offset, list(size), list(stride))
    return made


def _same_place(storage: Any, value: Tensor) -> Tensor:
    """What lies in a storage of the device where a tensor on the CPU lies in its own."""
    return _tensor(storage, value.dtype, int(value.storage_offset()), value.shape, value.stride())


def _give(value: Tensor) -> Tensor:
    """A tensor on the device with the numbers of one on the CPU, in the same memory."""
    host = value.untyped_storage()
    if host.nbytes() == 0:
        host = torch.UntypedStorage(1)
    storage = _new(host)
    made = _same_place(storage, value)
    made.untyped_storage().host = host  # pyright: ignore[reportAttributeAccessIssue]  # as long as the storage is there
    return made


def seen(value: Tensor) -> Tensor:
    """A tensor on the CPU in the memory of one on the device."""
    host: Any = value.untyped_storage().host  # pyright: ignore[reportAttributeAccessIssue]
    alias = torch.empty(0, dtype=value.dtype)
    alias.set_(host, value.storage_offset(), value.shape, value.stride())
    if value.is_conj():
        alias = torch._conj(alias)
    return torch._neg_view(alias) if value.is_neg() else alias


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Lists and tuples of tensors, each changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _check_device(name: str, value: Tensor, *, index: bool, listed: bool = False) -> None:
    """A number by itself may lie on the CPU, as for a real device; not one of a list of tensors that are joined."""
    if value.device.type == "cpu" and (value.dim() > 0 or (listed and not index)):
        if not index:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found one of shape "
                f"{list(value.shape)} on the CPU beside one on {NAME}:0 (asked by {_asked_by()})"
            )
        WAITS.add(f"{name} with indices on the CPU")


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    if name in _OWN:
        return _OWN[name](*args, **kwargs)
    if op._schema.name in _READS_VALUES or name in _READS_VALUES:
        WAITS.add(op._schema.name.removeprefix("aten::"))
    on_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    indices = op._schema.name in _TAKES_INDICES
    given: list[tuple[Tensor, Tensor]] = []  # each tensor of the device, and how it is seen on the CPU

    def look(value: Tensor, *, listed: bool = False) -> Tensor:
        if not _on_device(value):
            _check_device(name, value, index=indices, listed=listed)
            return value
        if indices and value.dtype in (torch.bool, torch.uint8):
            WAITS.add(f"{name} with a mask")
        given.append((value, seen(value)))
        return given[-1][1]

    def back(value: Tensor) -> Tensor:
        for own, alias in given:
            if alias is value:
                if own.shape != value.shape:  # what was given for a result had no size yet
                    _set_tensor(own, _give(value))
                return own
            if alias.numel() and alias.untyped_storage()._cdata == value.untyped_storage()._cdata:
                return _same_place(own.untyped_storage(), value)
        return _give(value)

    def looked(value: Any) -> Any:
        return _mapped(value, partial(look, listed=isinstance(value, (list, tuple))))

    args = tuple(_with_numbers(op, [looked(each) for each in args]))
    kwargs = {name: looked(each) for name, each in kwargs.items()}
    with _random(op, kwargs):
        result = op(*args, **kwargs)
    return result if on_cpu else _mapped(result, back)


def _with_numbers(op: Any, args: Sequence[Any]) -> Sequence[Any]:
    """PyTorch hands a tensor that stands for a Python number over as that number: make it a tensor again."""
    like = next((each.dtype for each in args if isinstance(each, Tensor)), torch.get_default_dtype())

    def made(value: Any, argument: Any) -> Any:
        if not isinstance(value, (bool, int, float, complex)) or str(argument.type) != "Tensor":
            return value
        own = torch.tensor(value).dtype
        return torch.tensor(
            value, dtype=like if torch.result_type(torch.empty(1, dtype=like), value) == like else own
        )

    return [made(value, argument) for value, argument in zip(args, op._schema.arguments, strict=False)]


@contextmanager
def _random(op: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Numbers that an operator draws come from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags or kwargs.get("generator") is not None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(MODULE.generator.get_state())
    try:
        yield
    finally:
        MODULE.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    plain = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return _give(_poisoned(plain))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return _give(_poisoned(torch.empty_strided(size, stride, dtype=dtype)))


def _poisoned(value: Tensor) -> Tensor:
    """Memory that was never written, or was given back: its numbers are not to be used."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        value.fill_(float("nan"))
    return value


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    across = source.device != target.device
    host = source if source.device.type == "cpu" else target
    if across and not (non_blocking and host.is_pinned()):
        WAITS.add("copy to the device" if _on_device(target) else "copy to the CPU")
    (seen(target) if _on_device(target) else target).copy_(seen(source) if _on_device(source) else source)
    return target


def _resize(value: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    number = 1
    for each in size:
        number *= each
    if number * value.element_size() > value.untyped_storage().nbytes():
        fresh = _give(torch.empty(number, dtype=value.dtype))
        storage, offset = fresh.untyped_storage(), 0
    else:
        storage, offset = value.untyped_storage(), value.storage_offset()
    stride = torch.empty(size, device="meta").stride()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU, value, storage, offset, list(size), list(stride))
    return value


def _set_storage(value: Tensor, storage: Any, offset: int = 0, size: Any = None, stride: Any = None) -> Tensor:
    if size is None:
        size, stride = [storage.nbytes() // value.element_size()], [1]
    stride = stride or torch.empty(size, device="meta").stride()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU, value, storage, offset, list(size), list(stride))
    return value


def _set_tensor(value: Tensor, source: Tensor) -> Tensor:
    return _set_storage(value, source.untyped_storage(), int(source.storage_offset()), source.shape, source.stride())


_OWN: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from,
    "aten::resize_": _resize,
    "aten::set_.source_Storage": _set_storage,
    "aten::set_.source_Storage_storage_offset": _set_storage,
    "aten::set_.source_Tensor": _set_tensor,
}


def _convolution(*args: Any) -> Tensor:
    return _run(_aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, given: Tensor, weight: Tensor, *rest: Any) -> Any:
    *options, mask = rest
    return _run(_aten.convolution_backward.default, gradient, given, weight, [weight.shape[0]], *options, mask)


_COLLECTIVES = [
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "reduce_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
    "recv_any_source_",
    "barrier",
]


def _collective(op: Any) -> Callable[..., Any]:
    """A collective over gloo, in the device's memory."""

    def run(*args: Any) -> Any:
        given: list[tuple[Tensor, Tensor]] = []

        def look(value: Tensor) -> Tensor:
            if not _on_device(value):
                _check_device(op.__name__, value, index=False)
                return value
            given.append((value, seen(value)))
            return given[-1][1]

        def back(value: Tensor) -> Tensor:
            return next((own for own, alias in given if alias.data_ptr() == value.data_ptr()), value)

        result = op(*_mapped(args, look))
        return _mapped(result, back)

    return run


# What autocast computes in the short dtype, and in float32 (of those that shipped models and losses call).
_SHORT = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "scaled_dot_product_attention")
_FULL = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss", "mse_loss")


def _autocast(op: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """An operator under autocast; `dtype`: None: the short one that is asked for."""
    keys: Any = torch._C.DispatchKey
    below = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        target = dtype or torch.get_autocast_dtype(NAME)

        def cast(value: Tensor) -> Tensor:
            short = value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            return value.to(target) if short and _on_device(value) else value

        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*_mapped(args, cast), **{name: _mapped(each, cast) for name, each in kwargs.items()})

    return run


def _install_autocast() -> None:
    """Without kernels of its own a device computes nothing under autocast."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    casting = torch.library.Library("aten", "IMPL")
    for names, dtype in ((_SHORT, None), (_FULL, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(_aten, packet), overload or "default")
            casting.impl(name, _autocast(op, dtype), "AutocastPrivateUse1")
    _KEPT.extend((others, casting))


def _patch_pinned_memory() -> None:
    """Pinned memory is marked, not made: PyTorch would ask the device's own allocator for it."""
    empty, is_pinned, to = torch.empty, Tensor.is_pinned, Tensor.to

    def marked(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if pin_memory:
            made.untyped_storage().pinned = True  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def pin(self: Tensor, *_: Any) -> Tensor:
        return marked(self.shape, dtype=self.dtype, pin_memory=True).copy_(self)

    def pinned(self: Tensor, *args: Any) -> bool:
        return getattr(self.untyped_storage(), "pinned", False) or is_pinned(self, *args)

    parse_to: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _on_device(self) and type(self) is Tensor:
            device, dtype, non_blocking, _ = parse_to(
                *args, **{name: value for name, value in kwargs.items() if name != "copy"}
            )
            if non_blocking and device is not None and device.type == "cpu":  # a copy that goes on behind the host
                return marked(self.shape, dtype=dtype or self.dtype, pin_memory=True).copy_(self, non_blocking=True)
        return to(self, *args, **kwargs)

    torch.empty, Tensor.pin_memory, Tensor.is_pinned, Tensor.to = marked, pin, pinned, moved  # pyright: ignore


def _patch_freed_memory() -> None:
    """FSDP frees the memory of gathered parameters and allocates it again; here it is only overwritten."""
    storage: Any = torch.UntypedStorage
    resize, size = storage.resize_, storage.size

    def resized(self: Any, number: int) -> Any:
        if self.device.type != NAME:
            return resize(self, number)
        self.freed = number == 0
        if self.freed:
            torch.empty(0, dtype=torch.uint8).set_(self.host).fill_(0xFF)
        return self

    def sized(self: Any) -> int:
        return 0 if getattr(self, "freed", False) else size(self)

    storage.resize_, storage.size = resized, sized


def install() -> None:
    """Make the device known to this process. It can't be taken back."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    messages = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of kernels that take another's place
        for name in _COLLECTIVES:
            messages.impl(
                name, _collective(getattr(torch.ops.c10d, name).default), "PrivateUse1", allow_override=True
            )
    convolutions = torch.library.Library("aten", "IMPL")
    convolutions.impl("convolution_overrideable", _convolution, "PrivateUse1", allow_override=True)
    convolutions.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1", allow_override=True)
    _KEPT.extend((library, messages, convolutions))
    _install_autocast()
    _patch_pinned_memory()
    _patch_freed_memory()

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("pretended", create, devices=[NAME])


_KEPT: list[torch.library.Library] = []
