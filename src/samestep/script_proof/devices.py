"""Runs a script that names accelerators on the CPU, or all of its ranks on one accelerator (`--on`).

What the script passes to PyTorch is changed where it passes it: devices, back ends of messages, pinned memory,
autocast. Its own lines stay as they are, and each change is noted with the line that asked for the device. On the
CPU the accelerator is said to be there, so that the script takes the branches that it takes with one.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from samestep.recording.calls import Call
from samestep.torch_internals.sharded import DTensor
from samestep.torch_internals.tensors import look_up_constructors

Note = Callable[[str, str], None]  # what was changed, and the place that asked for it

# What PyTorch takes where a script names no kind of accelerator.
USUAL_KIND: str = inspect.signature(torch.amp.GradScaler.__init__).parameters["device"].default
# What PyTorch says to a script that asks for an accelerator where it finds none.
NO_ACCELERATOR = re.compile(
    r"doesn't have NCCL built in|no GPUs found|not compiled with CUDA|Found no NVIDIA driver|"
    r"assert torch\.cuda\.is_available|No CUDA GPUs are available|"
    r"deserialize object on a CUDA device|CUDA driver initialization failed"
)
_CPU = torch.device("cpu")
_REAL_DEVICE, _REAL_GENERATOR = torch.device, torch.Generator
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye from_file full full_like linspace logspace normal "
    "ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor sparse_coo_tensor "
    "tensor tril_indices triu_indices zeros zeros_like hann_window hamming_window bartlett_window blackman_window"
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")
_OF_CPUS = ("gloo", "mpi", "fake")  # back ends of messages that need no accelerator


def target_of(on: str) -> torch.device:
    """The device that `--on` names: the CPU, or the accelerator of a number."""
    return _CPU if on == "cpu" else _REAL_DEVICE(USUAL_KIND, int(on.partition(":")[2]))


def install(target: torch.device, *, devices: int, local_rank: int, note: Note) -> None:
    """From here on accelerators that the script names are `target`, and there are said to be so many."""
    turn = _Turn(target, note)
    _devices(turn)
    _tensors(turn)
    _modules(turn)
    _messages(turn)
    if target == _CPU:
        _mixed_precision(turn)
        _attention(turn)
        _memory(turn)
        _answers_of_cpus(turn, devices, local_rank)
    else:
        _one_device(turn, devices)


class _Turn:
    """Says which device takes the place of another one, and notes it."""

    def __init__(self, target: torch.device, note: Note) -> None:
        self.target = target
        self._kinds = sorted(_device_modules() - {"cpu", "accelerator"})
        self._named = re.compile(rf"({'|'.join(self._kinds)})(:\d+)?")
        self._note = note
        self._noted: set[tuple[str, str]] = set()

    @property
    def kinds(self) -> list[str]:
        """The kinds of accelerators that PyTorch knows."""
        return self._kinds

    def names(self, value: Any) -> bool:
        """Whether a value names an accelerator."""
        if isinstance(value, _REAL_DEVICE):
            return value.type in self._kinds
        return isinstance(value, str) and self._named.fullmatch(value) is not None

    def device(self, value: Any) -> Any:
        """The device in place of the one that is asked for: also a number, as of a rank's own accelerator."""
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number and not self.names(value):
            return value
        if self.target == _CPU:
            self.note(f"device {str(value)!r}")
            return self.target
        real = _REAL_DEVICE(USUAL_KIND, value) if number else _REAL_DEVICE(value)
        if real.index in (None, self.target.index):
            return value
        self.note(f"device {str(value)!r}")
        return _REAL_DEVICE(real.type, self.target.index)

    def kind(self, value: Any) -> Any:
        """The same of a kind of devices: a string without a number."""
        if self.target == _CPU and self.names(value):
            self.note(f"device {str(value)!r}")
            return "cpu"
        return value

    def note(self, what: str) -> None:
        """Note a change, once a place. What PyTorch itself asks for is not the script's."""
        place = place_outside()
        if place is not None and (what, place) not in self._noted:
            self._noted.add((what, place))
            self._note(what, place)


def _device_modules() -> set[str]:
    """The modules of PyTorch that each stand for a kind of device."""
    modules = {name: value for name, value in vars(torch).items() if isinstance(value, ModuleType)}
    return {name for name, module in modules.items() if {"is_available", "device_count"} <= vars(module).keys()}


def place_outside() -> str | None:
    """The line outside of PyTorch that is being run; None where PyTorch called itself."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("samestep.", "torch.nn.")) and module not in ("contextlib", "functools"):
            break
        frame = frame.f_back
    else:
        return None
    if module.partition(".")[0] == "torch":
        return None
    file = Path(frame.f_code.co_filename)
    name = str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else file.name
    return f"{name}:{frame.f_lineno}"


def _wrap(owner: Any, name: str, change: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]) -> None:
    """Replace a function by one whose arguments are changed first."""
    call = getattr(owner, name)

    @wraps(call)
    def changed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return call(*args, **kwargs)

    setattr(owner, name, changed)


def _with(args: tuple[Any, ...], at: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments with one of them changed, if there are so many."""
    return (*args[:at], change(args[at]), *args[at + 1 :]) if len(args) > at else args


def _of_keyword(turn: _Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """`device=` and `pin_memory=` of a function that makes tensors."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": turn.device(kwargs["device"])}
    if kwargs.get("pin_memory") and turn.target == _CPU:
        turn.note("pinned memory")
        kwargs = {**kwargs, "pin_memory": False}
    return args, kwargs


def _devices(turn: _Turn) -> None:
    """`torch.device`, `torch.Generator`, the default device, and `torch.load`."""

    def device(*args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and isinstance(args[0], int):
            return turn.device(args[0]) if turn.target == _CPU else _REAL_DEVICE(turn.device(args[0]))
        return turn.device(_REAL_DEVICE(*args, **kwargs))

    torch.device = _stand_in(_REAL_DEVICE, device)  # pyright: ignore[reportAttributeAccessIssue]

    def generator(device: Any = "cpu") -> torch.Generator:
        return _REAL_GENERATOR(turn.device(device))

    torch.Generator = _stand_in(_REAL_GENERATOR, generator)  # pyright: ignore[reportAttributeAccessIssue]
    _wrap(torch, "set_default_device", lambda args, kwargs: (_with(args, 0, turn.device), kwargs))
    load = torch.load

    @wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _location(turn, map_location), *args, **kwargs)

    torch.load = loaded


def _stand_in(real: type, make: Callable[..., Any]) -> type:
    """A class that makes objects of another one, which are its instances: for a class without subclasses."""

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    return Meta(real.__name__, (), {"__module__": real.__module__, "__qualname__": real.__qualname__})


def _location(turn: _Turn, location: Any) -> Any:
    """Where torch.load puts tensors: a mapping or a function may name accelerators too."""
    if isinstance(location, (str, _REAL_DEVICE)):
        return turn.device(location)
    if turn.target != _CPU:
        return location
    if location is not None:
        turn.note("map_location of torch.load")
    return "cpu"


def _tensors(turn: _Turn) -> None:
    """Functions that make tensors, and methods that move them."""
    # What `with torch.device(...)` applies to is looked up once: it has to be PyTorch's functions, not those below.
    look_up_constructors()
    for name in _FACTORIES.split():
        if hasattr(torch, name):
            _wrap(torch, name, lambda args, kwargs: _of_keyword(turn, args, kwargs))
    for name in _NEW:
        _wrap(torch.Tensor, name, lambda args, kwargs: _of_keyword(turn, args, kwargs))
    _moves(turn, torch.Tensor)


def _moves(turn: _Turn, owner: Any) -> None:
    """`to` and the methods that are called like a kind of accelerator, of tensors or modules."""
    _wrap(owner, "to", lambda args, kwargs: _of_keyword(turn, _with(args, 1, turn.device), kwargs))
    for kind in turn.kinds:
        if hasattr(owner, kind) and turn.target == _CPU:
            setattr(owner, kind, _stays(turn, kind))
        elif hasattr(owner, kind):
            _wrap(owner, kind, lambda args, kwargs: _of_keyword(turn, _with(args, 1, turn.device), kwargs))


def _stays(turn: _Turn, kind: str) -> Call:
    """A method that would have moved something to an accelerator."""

    def stays(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn.note(f".{kind}()")
        return self.to("cpu")

    return stays


def _modules(turn: _Turn) -> None:
    """Modules are moved as tensors are; wrappers take the devices of their ranks."""
    _moves(turn, nn.Module)
    _wrap(
        DistributedDataParallel,
        "__init__",
        lambda args, kwargs: _without(turn, args, kwargs, "device_ids", "output_device", at=2),
    )
    if turn.target != _CPU:
        return

    def one_copy(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []

    DataParallel.__init__ = one_copy


def _without(
    turn: _Turn, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str, at: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without some that name devices, which stand from `at` on if they are given by position."""
    values = [value for value in args[at : at + len(names)] if value is not None]
    values += [kwargs[name] for name in names if kwargs.get(name) is not None]
    if values:
        turn.note(" and ".join(name for name in names if name in kwargs) or names[0])
    args = (*args[:at], *([None] * len(args[at : at + len(names)])), *args[at + len(names) :])
    return args, {name: value for name, value in kwargs.items() if name not in names}


def _messages(turn: _Turn) -> None:
    """Process groups send over gloo: NCCL needs an accelerator for each rank."""
    for name, at in (("init_process_group", 0), ("new_group", 2)):

        def change(args: Any, kwargs: Any, at: int = at) -> tuple[Any, Any]:
            if "backend" in kwargs:
                kwargs = {**kwargs, "backend": _back_end(turn, kwargs["backend"])}
            args = _with(args, at, lambda value: _back_end(turn, value))
            return args, {key: value for key, value in kwargs.items() if key not in ("device_id", "pg_options")}

        for place in (dist.distributed_c10d, dist):
            _wrap(place, name, change)
    for place in (dist.distributed_c10d, dist):
        _wrap(place, "barrier", lambda args, kwargs: _without(turn, args, kwargs, "device_ids", at=2))
    if turn.target == _CPU:
        dist.is_nccl_available = lambda: True
        for place in (dist.device_mesh, dist):
            _wrap(place, "init_device_mesh", lambda args, kwargs: _mesh(turn, args, kwargs, at=0))
        _wrap(dist.device_mesh.DeviceMesh, "__init__", lambda args, kwargs: _mesh(turn, args, kwargs, at=1))


def _back_end(turn: _Turn, back_end: Any) -> Any:
    if not isinstance(back_end, str) or back_end.lower() in _OF_CPUS:
        return back_end
    turn.note(f"back end {back_end!r}: gloo")
    return "gloo"


def _mesh(turn: _Turn, args: tuple[Any, ...], kwargs: dict[str, Any], *, at: int) -> tuple[Any, Any]:
    if "device_type" in kwargs:
        kwargs = {**kwargs, "device_type": turn.kind(kwargs["device_type"])}
    return _with(args, at, turn.kind), kwargs


def _mixed_precision(turn: _Turn) -> None:
    """Autocast and the scaler of gradients; the accelerator's type is kept, which is another one than the CPU's."""
    begin = torch.autocast.__init__

    @wraps(begin)
    def autocast(self: Any, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if turn.names(device_type):
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            turn.note(f"autocast of {device_type!r}")
            device_type = "cpu"
        begin(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = autocast
    make = torch.amp.GradScaler.__init__

    @wraps(make)
    def scaler(self: Any, device: Any = USUAL_KIND, *args: Any, **kwargs: Any) -> None:
        make(self, turn.kind(device), *args, **kwargs)

    torch.amp.GradScaler.__init__ = scaler


def _is_of_heads(placement: Any, dims: int) -> bool:
    """Whether ranks have samples or heads of an attention's input, and no parts of its tokens or numbers."""
    return placement.is_shard() and placement.dim % dims < dims - 2


def _attention(turn: _Turn) -> None:
    """Attention of DTensors that ranks have by samples or heads: PyTorch shards the accelerator's kernels alone."""
    call = F.scaled_dot_product_attention

    @wraps(call)
    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        parts = (query, key, value)
        if not all(isinstance(each, DTensor) for each in parts) or any(isinstance(each, Tensor) for each in args):
            return call(*parts, *args, **kwargs)
        placements = query.placements
        alike = all(each.placements == placements for each in parts)
        if not alike or not all(each.is_replicate() or _is_of_heads(each, query.ndim) for each in placements):
            return call(*parts, *args, **kwargs)
        turn.note("attention of DTensors: each rank's heads")
        result = call(*(each.to_local() for each in parts), *args, **kwargs)
        return DTensor.from_local(result, query.device_mesh, placements, run_check=False)

    F.scaled_dot_product_attention = attend


def _memory(turn: _Turn) -> None:
    """Pinned memory is an accelerator's."""
    make = DataLoader.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.pin_memory:
            turn.note("pinned memory")
            self.pin_memory = False

    DataLoader.__init__ = made

    def pinned(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn.note("pinned memory")
        return self

    torch.Tensor.pin_memory = pinned
    torch.Tensor.record_stream = lambda self, s: None


class Idle:
    """A stream, an event or a context of a device that has done everything when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _answers_of_cpus(turn: _Turn, devices: int, local_rank: int) -> None:
    """What the module of the usual accelerator, and that of any accelerator, say and do without one."""
    names = [USUAL_KIND, "accelerator"]
    for name in names:
        module = getattr(torch, name, None)
        if module is None:  # torch.accelerator is there since 2.6
            continue
        for function, answer in _answers(devices, local_rank).items():
            if hasattr(module, function):
                setattr(module, function, _told(turn, f"torch.{name}.{function}", answer))
        for function in ("Stream", "Event", "ExternalStream", "StreamContext", "stream", "device", "device_index"):
            if hasattr(module, function):
                setattr(module, function, Idle)
        for tensor in [kind for kind in vars(module) if kind.endswith("Tensor") and hasattr(torch, kind)]:
            setattr(module, tensor, getattr(torch, tensor))
        if (ranges := getattr(module, "nvtx", None)) is not None:
            vars(ranges).update(range_push=_nothing, range_pop=_nothing, mark=_nothing, range=Idle)


def _told(turn: _Turn, name: str, answer: Any) -> Call:
    """A function with an answer of ours; functions, too, that are to be called."""

    def told(*args: Any, **kwargs: Any) -> Any:
        turn.note(f"{name}()")
        return answer(*args, **kwargs) if callable(answer) else answer

    return told


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _answers(devices: int, local_rank: int) -> Mapping[str, Any]:
    """Answers by function. Seeds of the accelerator are not the CPU's: they would move its weights and samples."""
    memory = psutil.virtual_memory().total
    properties = SimpleNamespace(name="CPU", total_memory=memory, major=8, minor=0, multi_processor_count=1)
    current = {"device": local_rank % max(1, devices)}

    def chosen(device: Any = None) -> None:
        if isinstance(device, int):
            current["device"] = device

    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": devices,
        "set_device": chosen,
        "set_device_index": chosen,
        "set_device_idx": chosen,
        "current_accelerator": _CPU,
        "get_device_name": "CPU",
        "get_device_capability": (properties.major, properties.minor),
        "get_device_properties": properties,
        "mem_get_info": (memory, memory),
        "get_memory_info": (memory, memory),
        "current_stream": lambda *args: Idle(),
        "default_stream": lambda *args: Idle(),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * devices,
        "memory_stats": {},
        "memory_summary": "",
    }
    for name in ("current_device", "current_device_index", "current_device_idx"):
        answers[name] = lambda: current["device"]
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers |= {name: 0, f"max_{name}": 0, f"reset_max_{name}": None}
    idle = (
        "synchronize init empty_cache ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state "
        "set_rng_state_all set_stream reset_peak_memory_stats reset_accumulated_memory_stats "
        "set_per_process_memory_fraction"
    )
    return answers | dict.fromkeys(idle.split())


def _one_device(turn: _Turn, devices: int) -> None:
    """All ranks take one accelerator, and each is told that there is one for it."""
    for name in (USUAL_KIND, "accelerator"):
        module = getattr(torch, name, None)
        if module is None:
            continue
        for function, call in list(vars(module).items()):
            if _takes_device(call):
                _wrap(module, function, lambda args, kwargs: _of_keyword(turn, _with(args, 0, turn.device), kwargs))
        module.device_count = lambda: devices


def _takes_device(call: Any) -> bool:
    """Whether a function's first parameter is a device."""
    if not inspect.isfunction(call) or call.__name__.startswith("_"):
        return False
    return next(iter(inspect.signature(call).parameters), None) == "device"
