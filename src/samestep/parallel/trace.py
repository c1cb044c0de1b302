"""Trace: follows a model's forward on tensors that have a shape and no values, so without computing.

A forward that asks for values, as that of a mixture of experts does, is followed with values.

Fake tensors go through the model's own forward: hooks note modules, a function mode notes calls, a dispatch mode
counts products, and autograd's graph says what is computed from what. Nothing is allocated and nothing computed, so
that a model that no single rank could hold is followed in the same way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.func import functional_call
from torch.utils import _pytree as pytree

from samestep.errors import UserError
from samestep.parallel.attributes import Attributes, forget_results
from samestep.parallel.blocks import caller_of, is_list_of_like
from samestep.parallel.calls import Stop, Trace, seen_of
from samestep.parallel.exact.grouped_product import Followed
from samestep.parallel.nests import map_tensors, tensors_in
from samestep.parallel.recorder import Recorder
from samestep.parallel.unused_parameters import depending


def trace(model: nn.Module, inputs: Any) -> Trace:
    """Follow one forward of `inputs` (as a task's `Batch.inputs`), without values or where it asks for some with.

    Raises UserError where it can be followed neither way.
    """
    found = follow(model, inputs)
    if found.stop is not None:
        found = follow_values(model, inputs)
    if found.stop is not None:
        where = f"{found.stop.module} ({_kind(model, found.stop.module)})" if found.stop.module else "its own forward"
        raise UserError(
            f"{type(model).__name__}: its forward can't be followed, since {where} fails ({found.stop.reason}); "
            "use dp2, zero1x2 or fsdp2, which need no such look"
        )
    return found


def follow_values(model: nn.Module, inputs: Any) -> Trace:
    """Follow a forward with values, as far as that goes.

    Values decide which experts of a mixture are called. So that they don't decide what a layout makes of them, those
    that were not called are called as well, each with what another one was given.
    """
    with torch.random.fork_rng():
        return _follow(model, inputs, "everything")


def follow(model: nn.Module, inputs: Any) -> Trace:
    """Follow a forward without values, as far as that goes.

    Where the forward asks for a value, it is followed again with the values of the inputs and of what is computed
    from them alone, such as whether a mask is causal; parameters, and what is computed from them, have none.
    """
    found = _follow(model, inputs, "nothing")
    if found.stop is None:
        return found
    with torch.random.fork_rng(devices=[]):
        further = _follow(model, inputs, "inputs")
    return found if further.stop is not None else further


def _follow(model: nn.Module, inputs: Any, valued: Literal["nothing", "inputs", "everything"]) -> Trace:
    """Follow a forward in which the inputs, or they and the parameters, have values, or nothing has."""
    recorder = Recorder(values=valued == "everything")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters: dict[Node, str] = {}
    stop: Stop | None = None
    with _attributes_kept(model), _without_log():
        # In training mode, since PyTorch's encoder layers skip their submodules in evaluation.
        # `_attributes_kept` gives the mode back.
        model.train()
        try:
            with ExitStack() as stack:
                if valued == "everything":
                    for handle in _complete_lists(model):
                        stack.callback(handle.remove)
                for handle in recorder.attach(model):
                    stack.callback(handle.remove)
                stack.enter_context(torch.enable_grad())
                made = {"nothing": _unreal, "inputs": _on_the_cpu, "everything": _real}[valued]
                with nullcontext() if valued == "everything" else mode:
                    parameter = _real if valued == "everything" else _unreal
                    state = {name: parameter(tensor) for name, tensor in _named_tensors(model)}
                if valued == "nothing":  # else a tensor without values brings its mode along
                    stack.enter_context(mode)
                arguments, keywords = _as_call(pytree.tree_map_only(Tensor, made, _plain(inputs)))
                leaves = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
                parameters = {get_gradient_edge(leaf).node: name for name, leaf in leaves.items()}
                recorder.functions.watch(state)
                recorder.dataflow.watch(leaves)
                stack.enter_context(recorder.functions)
                stack.enter_context(recorder.flops)
                stack.enter_context(recorder.dataflow)
                functional_call(model, state, arguments, keywords, tie_weights=True)
        except Exception as error:  # whatever a model's own code raises where it finds no values
            stop = Stop(modules=recorder.running(), reason=f"{type(error).__name__}: {first_line(error)}")
    return Trace(
        calls=sorted(recorder.calls, key=lambda call: call.began),
        parameters=parameters,
        flops=recorder.flops.count,
        uses=recorder.functions.uses,
        last_uses=recorder.functions.last_uses,
        attentions=recorder.functions.attentions,
        draws=recorder.functions.draws,
        dataflow=recorder.dataflow.found(),
        stop=stop,
        asking=dict(recorder.functions.asking),
    )


def _complete_lists(model: nn.Module) -> Iterator[Any]:
    """Hooks by which of equal modules in a list either none is called by its caller, or all are."""
    modules = dict(model.named_modules())
    for name, container in modules.items():
        if is_list_of_like(container):
            called: dict[nn.Module, tuple[Any, Any]] = {}
            for child in container.children():
                note = partial(_note_call, called)
                yield child.register_forward_pre_hook(note, with_kwargs=True)
            yield modules[caller_of(model, name)].register_forward_hook(partial(_call_rest, container, called))


def _note_call(called: dict[nn.Module, tuple[Any, Any]], module: nn.Module, arguments: Any, keywords: Any) -> None:
    called.setdefault(module, (arguments, keywords))


def _call_rest(
    container: nn.Module, called: dict[nn.Module, tuple[Any, Any]], caller: nn.Module, arguments: Any, output: Any
) -> Any:
    """Call those that were not, and let the caller's output depend on what they give."""
    rest = [child for child in container.children() if child not in called]
    if not called or not rest:
        return None
    given, keywords = next(iter(called.values()))
    made = pytree.tree_leaves([child(*given, **keywords) for child in rest])
    leaves, form = pytree.tree_flatten(output)
    differentiable = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    if not any(differentiable):
        return None
    first = differentiable.index(True)
    leaves[first] = depending(leaves[first], [each for each in made if isinstance(each, Tensor)])
    return pytree.tree_unflatten(leaves, form)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().partition("\n")[0]


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


@contextmanager
def _without_log() -> Iterator[None]:
    """PyTorch logs the traceback of each operator that has no answer without values; the error tells its caller."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give modules back the attributes that a forward has set: caches of tensors without values are of no use.

    A shared module's parameters are among them, which `functional_call` does not put back.
    """
    before = Attributes(model)
    try:
        yield
    finally:
        before.restore()
        forget_results(model)


def imagine(
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    valued: Callable[[Tensor], bool] | None = None,
    *,
    computed: bool = False,
) -> Any:
    """What a module would give for these arguments: a nest in which every tensor is a `Seen`.

    The identity of one that is an argument as it was is the argument's number among all tensors, and else -1.
    `valued`: which arguments keep their values, since the forward asks for them; none. `computed`: the output is
    computed, of any numbers, since a size in the forward depends on them, as that of what `nonzero` gives does.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if computed:
            state = {name: _real(tensor) for name, tensor in _named_tensors(module)}
            given = [_any_numbers(tensor) for tensor in tensors_in((arguments, keywords))]
        else:
            with mode:
                state = {name: _unreal(tensor) for name, tensor in _named_tensors(module)}
                given = [
                    _on_the_cpu(tensor) if valued is not None and valued(tensor) else _unreal(tensor)
                    for tensor in tensors_in((arguments, keywords))
                ]
            if valued is None:
                stack.enter_context(mode)
        stack.enter_context(Followed())
        stack.enter_context(_without_log())
        taken = iter(given)
        args, named = map_tensors(lambda _: next(taken), (tuple(arguments), dict(keywords)))
        output = functional_call(module, state, args, named, tie_weights=True)
        numbers = {id(tensor): number for number, tensor in enumerate(given)}
        return map_tensors(lambda tensor: replace(seen_of(tensor), identity=numbers.get(id(tensor), -1)), output)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; of a tied one its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _unreal(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the CPU, made inside a fake mode: no memory, no values."""
    unreal = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    # Also what is frozen: a layout asks which parameters a tensor is computed from, not which are trained.
    return unreal.requires_grad_(
        isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
    )


def _real(tensor: Tensor) -> Tensor:
    """A tensor that computes as another does, and leaves it as it is."""
    differs = tensor.is_floating_point() or tensor.is_complex()
    if tensor.is_meta:  # its values are to come, and others do as well: a plan depends on none
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        values = values.normal_(generator=torch.Generator().manual_seed(0)) * 0.02 if differs else values.zero_()
    else:
        values = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    return values.requires_grad_(isinstance(tensor, nn.Parameter) and differs)


def _any_numbers(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with the same values, or where it has none (NaN) with zeros."""
    return tensor.detach().as_subclass(Tensor).to("cpu", copy=True).nan_to_num()


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """A tensor of the same values, which a forward may change."""
    return tensor.detach().to("cpu", copy=True)


def _plain(inputs: Any) -> Any:
    """A mapping of any kind as a dictionary, which every nest walker knows."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the arguments and keywords that a model is called with."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
