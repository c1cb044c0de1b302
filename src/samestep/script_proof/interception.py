"""Wraps the functions of PyTorch and Accelerate whose calls the recorder needs.

A function is replaced where scripts find it, in its module and in those that have imported it already; modules that
are not imported yet are changed when they are (`after_import`). Under torch.compile the originals run: a recorder
inside of a graph would break it.
"""

import importlib.abc
import importlib.machinery
import multiprocessing.process
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from samestep.recording.calls import Call, listen_to_modules
from samestep.torch_internals import dataloading


class Listener(Protocol):
    """Callbacks of the recorder. `call` is the original function."""

    def module_called(self, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any: ...
    def backward_called(self, call: Call, tensors: Any, args: Any, kwargs: Any) -> Any: ...
    def clip_called(self, call: Call, parameters: Any, limit: Any, args: Any, kwargs: Any) -> Any: ...
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any: ...
    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None: ...
    def zeroed(self) -> None: ...
    def scaled(self, scaler: Any) -> None: ...
    def state_loaded(self) -> None: ...
    def targets_seen(self, count: float) -> None: ...
    def sent(self, value: Any) -> None: ...
    def dropout_seen(self) -> None: ...
    def loader_made(self, loader: Any) -> None: ...
    def loader_length(self, loader: Any, value: int) -> int: ...
    def iterator_made(self, indices: Any, loader: Any) -> Any: ...
    def pass_begun(self, dataset: Any) -> None: ...
    def fetcher_made(self) -> None: ...
    def sample(self, dataset: Any, number: Any, get: Callable[[], Any]) -> Any: ...
    def drawn(self, name: str, result: Any) -> None: ...
    def masked(self) -> None: ...
    def batch_seen(self, indices: Any, batch: Any) -> Any: ...
    def exhausted(self) -> None: ...
    def emptied(self, module: nn.Module) -> None: ...
    def process_starts(self, process: Any) -> None: ...
    def copies_made(self) -> None: ...
    def ranks_start(self, args: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], int]: ...
    def join(self, call: Call, args: Any, kwargs: Any) -> Any: ...
    def gathered(self, passed: Any, kept: Any) -> None: ...


def install(listener: Listener, *, dropout: bool) -> None:
    """Install a listener for the rest of the process. Without `dropout` none is applied."""
    # PyTorch has hooks for every optimizer and every module of a process. For what it has none, the functions
    # themselves are replaced, in each place from which scripts import them, and before the script runs: its
    # `from ... import` keeps whatever it finds. Libraries that may be missing are changed when first imported.
    register_optimizer_step_pre_hook(listener.before_step)
    register_optimizer_step_post_hook(listener.after_step)
    listen_to_modules(listener.module_called)
    _backward(listener)
    _clipping(listener)
    _losses(listener)
    _dropout(listener, kept=dropout)
    _loading(listener)
    _drawing(listener)
    _zeroing(listener)
    _scaling(listener)
    _batches(listener)
    _processes(listener)
    _messages(listener)
    _memory(listener)
    after_import("accelerate.accelerator", lambda module: _gathering(module, listener))


def _backward(listener: Listener) -> None:
    """Tensor.backward calls this as well."""
    call = torch.autograd.backward

    @wraps(call)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return listener.backward_called(call, tensors, args, kwargs)

    torch.autograd.backward = backward


def _clipping(listener: Listener) -> None:
    """Clipping by norm and by value, from both of its places, and FSDP's own."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        call = getattr(clip_grad, name)
        for place in (clip_grad, nn.utils):
            setattr(place, name, _clip(call, listener))
    after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel", lambda module: _fsdp_clipping(module, listener)
    )


def _clip(call: Call, listener: Listener) -> Call:
    """Wrap a clip function to report limit and norm; both arguments may be passed by keyword."""

    @wraps(call)
    def clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
        return listener.clip_called(call, parameters, limit, args, kwargs)

    @wraps(call)
    def by_keyword(*args: Any, **kwargs: Any) -> Any:
        words = dict(kwargs)
        arguments = list(args)
        first = arguments.pop(0) if arguments else words.pop("parameters")
        limit = arguments.pop(0) if arguments else words.pop("max_norm", words.pop("clip_value", None))
        return clip(first, limit, *arguments, **words)

    return by_keyword


def _fsdp_clipping(module: ModuleType, listener: Listener) -> None:
    """FSDP1 has a method of its own, whose norm is over all shards."""
    wrapper = module.FullyShardedDataParallel
    wrapper.clip_grad_norm_ = _clip(wrapper.clip_grad_norm_, listener)


def _losses(listener: Listener) -> None:
    """Wrap losses to report the number of targets in their mean, which may differ between ranks."""
    for name in ("cross_entropy", "nll_loss"):
        setattr(F, name, _of_classes(getattr(F, name), listener))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"):
        setattr(F, name, _elementwise(getattr(F, name), listener))


def _of_classes(call: Call, listener: Listener) -> Call:
    """A loss over classes, whose targets are counted with their weights."""

    @wraps(call)
    def counted(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and isinstance(target, Tensor) and not target.is_floating_point():
            weight = args[0] if args else kwargs.get("weight")
            listener.targets_seen(_weights(target.detach(), weight, kwargs.get("ignore_index", -100)))
        return call(input, target, *args, **kwargs)

    return counted


def _weights(target: Tensor, weight: Tensor | None, ignored: int) -> float:
    """Return the divisor of a mean over the targets."""
    kept = target[target != ignored]
    return kept.numel() if weight is None else weight.detach()[kept].double().sum().item()


def _elementwise(call: Call, listener: Listener) -> Call:
    """A loss over numbers, each of which counts."""

    @wraps(call)
    def counted(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and isinstance(target, Tensor):
            listener.targets_seen(target.numel())
        return call(input, target, *args, **kwargs)

    return counted


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def _dropout(listener: Listener, *, kept: bool) -> None:
    """Every dropout function, and attention's; kept or switched off."""
    dropout = F.dropout
    for name in _DROPOUTS:
        setattr(F, name, _drop(getattr(F, name), listener, kept=kept, shown=getattr(F, name) is dropout))
    attention = F.scaled_dot_product_attention

    @wraps(attention)
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ):
        if dropout_p > 0:
            listener.dropout_seen()
            if kept:
                listener.masked()
        return attention(query, key, value, attn_mask, dropout_p if kept else 0.0, *args, **kwargs)

    F.scaled_dot_product_attention = attend


def _drop(call: Call, listener: Listener, *, kept: bool, shown: bool) -> Call:
    """Wrap a dropout function to report calls, and to drop nothing if dropout is off."""

    @wraps(call)
    def drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0:
            listener.dropout_seen()
            if kept and p < 1 and shown and not torch.compiler.is_compiling():
                # The mask is drawn where the recorder sees it.
                kept_numbers = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
                return input.mul_(kept_numbers) if inplace else input * kept_numbers
            if kept:
                listener.masked()
        return call(input, p if kept else 0.0, training, inplace)

    return drop


def _loading(listener: Listener) -> None:
    """Report when an optimizer's state is loaded, which means that the script resumes a training."""
    call = torch.optim.Optimizer.load_state_dict

    @wraps(call)
    def load(self: Any, state_dict: Any) -> Any:
        listener.state_loaded()
        return call(self, state_dict)

    torch.optim.Optimizer.load_state_dict = load


_DRAWN = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "randperm"),
)
_DRAWN_IN_PLACE = (
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "geometric_",
    "cauchy_",
)
_NOT_THE_SCRIPTS = (
    "torch.utils.data",
    "torch.nn.init",
    "torch.nn.modules",
    "torch.optim",
)  # that draw for themselves


def _drawing(listener: Listener) -> None:
    """Report the random numbers that scripts draw, but for those of samplers and of new modules."""
    for name in _DRAWN:
        setattr(torch, name, _drawn(name, getattr(torch, name), listener))
    for name in _DRAWN_IN_PLACE:
        setattr(Tensor, name, _drawn(name, getattr(Tensor, name), listener))


def _drawn(name: str, call: Call, listener: Listener) -> Call:
    @wraps(call)
    def draw(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if not torch.compiler.is_compiling() and not _caller(2).startswith(_NOT_THE_SCRIPTS):
            listener.drawn(name, result)
        return result

    return draw


def _zeroing(listener: Listener) -> None:
    """Report when an optimizer or a model sets its gradients to zero."""
    for owner in (torch.optim.Optimizer, nn.Module):
        owner.zero_grad = _reporting(owner.zero_grad, listener.zeroed)


def _scaling(listener: Listener) -> None:
    """Report the scaler of gradients whose step is called."""
    call = torch.amp.GradScaler.step

    @wraps(call)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener.scaled(self)
        return call(self, *args, **kwargs)

    torch.amp.GradScaler.step = step


def _reporting(call: Call, report: Callable[[], None]) -> Call:
    @wraps(call)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        report()
        return call(*args, **kwargs)

    return reporting


_BATCH_SAMPLER = 4  # its place among a DataLoader's arguments


def _batches(listener: Listener) -> None:
    """DataLoader's iterator, whose batches are seen before the script gets them."""
    iterator = dataloading.BATCH_ITERATOR
    call = iterator.__next__

    def following(self: Any) -> Any:
        try:
            batch = call(self)
        except StopIteration:
            listener.exhausted()
            raise
        return listener.batch_seen(dataloading.numbers_of(self), batch)

    iterator.__next__ = following
    _indices(listener)


def _indices(listener: Listener) -> None:
    """The numbers of the samples, of data sets that are asked for them."""
    loader: Any = dataloader.DataLoader
    make_loader = loader.__init__

    def listened(iterator: Any, loader: Any) -> None:
        if dataloading.has_numbered_samples(loader):
            listener.pass_begun(loader.dataset)
            numbers = listener.iterator_made(dataloading.numbers_of(iterator), loader)
            dataloading.replace_numbers(iterator, numbers)

    @wraps(make_loader)
    def made_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        make_loader(self, *args, **kwargs)
        own = [kwargs.get("batch_sampler"), *args[_BATCH_SAMPLER : _BATCH_SAMPLER + 1]]
        if not any(setting is not None for setting in own) and getattr(self, "batch_sampler", None) is not None:
            listener.loader_made(self)

    length = loader.__len__

    @wraps(length)
    def known_length(self: Any) -> int:
        value = length(self)
        return listener.loader_length(self, value) if dataloading.has_numbered_samples(self) else value

    loader.__len__ = known_length
    dataloading.call_at_begin(listened)
    dataloading.call_for_samples(listener.fetcher_made, listener.sample)
    loader.__init__ = made_loader


def _processes(listener: Listener) -> None:
    """Report processes that the script starts: they may be its ranks."""
    base = multiprocessing.process.BaseProcess
    call = base.start

    def start(self: Any) -> None:
        listener.process_starts(self)
        call(self)

    base.start = start
    wrapper = nn.DataParallel
    make = wrapper.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not self.device_ids:
            listener.copies_made()

    wrapper.__init__ = made
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # hidden by the function of that name
    begin = module.start_processes

    @wraps(begin)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **kwargs: Any) -> Any:
        args, nprocs = listener.ranks_start(tuple(args), nprocs)
        return begin(fn, args, nprocs, *others, **kwargs)

    places: tuple[Any, ...] = (module, torch.multiprocessing)
    for place in places:
        place.start_processes = start_processes


_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("reduce", "gather", "all_gather_object", "gather_object"),
)


def _messages(listener: Listener) -> None:
    """Wrap collectives to report calls by the script, not by PyTorch's own modules such as FSDP."""
    for name in _COLLECTIVES:
        call = getattr(torch.distributed, name)
        setattr(torch.distributed, name, _reported(call, listener, reduces=name in ("all_reduce", "reduce")))
    begin = torch.distributed.init_process_group

    @wraps(begin)
    def join(*args: Any, **kwargs: Any) -> Any:
        return listener.join(begin, args, kwargs)

    for place in (torch.distributed, torch.distributed.distributed_c10d):
        place.init_process_group = join  # pyright: ignore[reportAttributeAccessIssue]


def _reported(call: Call, listener: Listener, *, reduces: bool) -> Call:
    """Wrap a collective to report the script's own calls, not those of PyTorch or DeepSpeed."""

    @wraps(call)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _is_the_scripts(_caller(2)):
            listener.sent((args[0] if args else kwargs.get("tensor")) if reduces else None)
        return call(*args, **kwargs)

    return collective


def _is_the_scripts(caller: str) -> bool:
    """Whether a module of this name sends for the script: its own, or PyTorch's functions with gradients."""
    return caller.startswith("torch.distributed.nn.") or not caller.startswith(("torch.", "deepspeed."))


def _memory(listener: Listener) -> None:
    """Report modules that get memory without values."""
    call = nn.Module.to_empty

    @wraps(call)
    def to_empty(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        listener.emptied(self)
        return result

    nn.Module.to_empty = to_empty


def _caller(levels: int) -> str:
    return str(sys._getframe(levels).f_globals.get("__name__", ""))


def _gathering(module: ModuleType, listener: Listener) -> None:
    """Accelerate's gather_for_metrics, which drops what filled the last batch up."""
    call = module.Accelerator.gather_for_metrics

    @wraps(call)
    def gather(accelerator: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        kept = call(accelerator, data, *args, **kwargs)
        listener.gathered(data, kept)
        return kept

    module.Accelerator.gather_for_metrics = gather


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Apply a change to a module when it is imported; at once if it already is."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, and changes it once it has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change
        self._looking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The module as it is found, with a loader that changes it once it has run."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run, change = spec.loader.exec_module, self._change

            def exec_module(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = exec_module
        return spec
