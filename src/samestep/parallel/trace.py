"""Trace: follows a model's forward on tensors that have a shape and no values, so without computing.

A forward that asks for values, as that of a mixture of experts does, is followed with values.

Fake tensors go through the model's own forward: hooks note modules, a function mode notes calls, a dispatch mode
counts products, and autograd's graph says what is computed from what. Nothing is allocated and nothing computed, so
that a model that no single rank could hold is followed in the same way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.func import functional_call

from samestep.data.nests import map_tensors, tensors_in
from samestep.errors import UserError, first_line, internal_line
from samestep.parallel.attributes import Attributes, forget_results, keeps_results, modules_in
from samestep.parallel.blocks import caller_of, is_list_of_like
from samestep.parallel.calls import Stop, Trace, seen_of
from samestep.parallel.code_state import code_kept
from samestep.parallel.exact.grouped_product import Followed
from samestep.parallel.layout_failure import internal_error
from samestep.parallel.recorder import Recorder
from samestep.parallel.unused_parameters import depending
from samestep.torch_internals import pytree
from samestep.torch_internals.fakes import FAKES_LOGGER, FakeTensorMode


def trace(model: nn.Module, inputs: Any, followed: Trace | None = None) -> Trace:
    """Trace one forward of `inputs` (like a task's `Batch.inputs`), without values, or with them if it needs them.

    `followed`: what `follow` has found already. Raises UserError if both fail.
    """
    followed_calls = follow(model, inputs) if followed is None else followed
    if followed_calls.stop is not None:
        followed_calls = follow_values(model, inputs)
    if followed_calls.stop is not None and followed_calls.stop.internal is not None:
        raise followed_calls.stop.internal
    if followed_calls.stop is not None:
        where = (
            f"{followed_calls.stop.module} ({_kind(model, followed_calls.stop.module)})"
            if followed_calls.stop.module
            else "its own forward"
        )
        raise UserError(
            f"{type(model).__name__}: its forward can't be followed, since {where} fails "
            f"({followed_calls.stop.reason}); use dp2, zero1x2 or fsdp2, which need no such look"
        )
    return followed_calls


def follow_values(model: nn.Module, inputs: Any) -> Trace:
    """Trace a forward with values, up to the first failure.

    The values decide which experts of a mixture are called. Since the trace should not depend on this, the others are
    called as well, with the arguments of one that was called.
    """
    with torch.random.fork_rng():
        return _follow(model, inputs, "everything")


def follow(model: nn.Module, inputs: Any) -> Trace:
    """Trace a forward without values, up to the first failure.

    If the forward asks for a value, it is traced again with the values of the inputs and of tensors that only depend
    on them, such as whether a mask is causal; parameters, and tensors that depend on them, have no values.
    """
    followed = _follow(model, inputs, "nothing")
    if followed.stop is None:
        return followed
    with torch.random.fork_rng(devices=[]):
        further = _follow(model, inputs, "inputs")
    return followed if further.stop is not None else further


_Valued = Literal["nothing", "inputs", "everything"]


def _follow(model: nn.Module, inputs: Any, valued: _Valued) -> Trace:
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
                if keeps_results(model):
                    _fill_caches(model, inputs, valued, mode)
                if valued == "everything":
                    for handle in _complete_lists(model):
                        stack.callback(handle.remove)
                for handle in recorder.attach(model):
                    stack.callback(handle.remove)
                stack.enter_context(torch.enable_grad())
                state, arguments, keywords = _traced_inputs(model, inputs, valued, mode, stack)
                leaves = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
                parameters = {get_gradient_edge(leaf).node: name for name, leaf in leaves.items()}
                recorder.functions.watch(state)
                recorder.dataflow.watch(leaves)
                stack.enter_context(recorder.functions)
                stack.enter_context(recorder.operators)
                functional_call(model, state, arguments, keywords, tie_weights=True)
        except Exception as error:  # whatever a model's own code raises where it finds no values
            reason = f"{type(error).__name__}: {first_line(error)}"
            stop = Stop(modules=recorder.running(), reason=reason, internal=_internal(model, error))
    return Trace(
        calls=sorted(recorder.calls, key=lambda call: call.began),
        parameters=parameters,
        flops=recorder.operators.flops,
        uses=recorder.functions.uses,
        last_uses=recorder.functions.last_uses,
        attentions=recorder.functions.attentions,
        draws=recorder.functions.draws,
        dataflow=recorder.dataflow.found(),
        stop=stop,
        decided=valued != "nothing"
        or any(isinstance(leaf, (str, int)) for leaf in pytree.tree_leaves(_plain(inputs))),
        asking=dict(recorder.functions.asking),
    )


def _internal(model: nn.Module, error: Exception) -> Exception | None:
    """The error to raise for one that is a mistake of samestep's own code; None for the model's."""
    line = internal_line(error)
    if line is None:
        return None
    failure = internal_error(
        None, type(model).__name__, error, line, "dp2, zero1x2 or fsdp2, which need no such look"
    )
    failure.__cause__ = error
    return failure


def _traced_inputs(
    model: nn.Module, inputs: Any, valued: _Valued, mode: FakeTensorMode, stack: ExitStack
) -> tuple[dict[str, Tensor], tuple[Any, ...], dict[str, Any]]:
    """The state, arguments and keywords of a forward that is followed; enters its mode for the rest of `stack`."""
    made = {"nothing": _unreal, "inputs": _on_the_cpu, "everything": _real}[valued]
    with nullcontext() if valued == "everything" else mode:
        parameter = _real if valued == "everything" else _unreal
        state = {name: parameter(tensor) for name, tensor in _named_tensors(model)}
    if valued == "nothing":  # else a tensor without values brings its mode along
        stack.enter_context(mode)
    arguments, keywords = _as_call(pytree.tree_map_only(Tensor, made, _plain(inputs)))
    return state, arguments, keywords


def _fill_caches(model: nn.Module, inputs: Any, valued: _Valued, mode: FakeTensorMode) -> None:
    """Run a forward so that methods keep their results, as BEiT's keep indices of positions for all layers.

    In the forward that is followed, no layer then takes such a result from another one, which a pipeline couldn't:
    any stage computes it where its cache doesn't have it.
    """
    before = Attributes(model)
    with suppress(Exception), ExitStack() as stack:  # the forward that is followed fails alike
        state, arguments, keywords = _traced_inputs(model, inputs, valued, mode, stack)
        functional_call(model, state, arguments, keywords, tie_weights=True)
    before.restore()


def _complete_lists(model: nn.Module) -> Iterator[Any]:
    """Register hooks so that of like modules in a list either all or none are called by their caller."""
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
    """Call the modules that were not called, and make the caller's output depend on their outputs."""
    rest = [child for child in container.children() if child not in called]
    if not called or not rest:
        return None
    call_arguments, keywords = next(iter(called.values()))
    made = pytree.tree_leaves([child(*call_arguments, **keywords) for child in rest])
    leaves, form = pytree.tree_flatten(output)
    differentiable = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    if not any(differentiable):
        return None
    first = differentiable.index(True)
    leaves[first] = depending(leaves[first], [tensor for tensor in made if isinstance(tensor, Tensor)])
    return pytree.tree_unflatten(leaves, form)


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


@contextmanager
def _without_log() -> Iterator[None]:
    """Disable PyTorch's log of operators that fail without values; the error itself is handled."""
    log = logging.getLogger(FAKES_LOGGER)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _attributes_kept(model: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules that a traced forward has set, such as caches of tensors without values.

    This includes a shared module's parameters, which `functional_call` does not restore. `others`: modules that the
    model is called with.
    """
    before = Attributes(model, *others)
    try:
        with code_kept(model, *others):
            yield
    finally:
        before.restore()
        for root in (model, *others):
            forget_results(root)


def imagine(
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    valued: Callable[[Tensor], bool] | None = None,
    *,
    computed: bool = False,
) -> Any:
    """Find the form of a module's output for these arguments: a nest in which every tensor is a `Seen`.

    The identity of an unchanged argument is its number among all argument tensors, otherwise -1. `valued`: selects
    the arguments that keep their values, since the forward asks for them; None: none. `computed`: run the module with
    arbitrary values, for forwards in which a size depends on values, such as that of `nonzero`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        # A buffer or a cache without values would be read in the next forward.
        stack.enter_context(_attributes_kept(module, *modules_in((arguments, keywords))))
        stack.enter_context(torch.no_grad())
        if computed:
            state = {name: _real(tensor) for name, tensor in _named_tensors(module)}
            inputs = [_any_numbers(tensor) for tensor in tensors_in((arguments, keywords))]
        else:
            with mode:
                state = {name: _unreal(tensor) for name, tensor in _named_tensors(module)}
                inputs = [
                    _on_the_cpu(tensor) if valued is not None and valued(tensor) else _unreal(tensor)
                    for tensor in tensors_in((arguments, keywords))
                ]
            if valued is None:
                stack.enter_context(mode)
        stack.enter_context(Followed())
        stack.enter_context(_without_log())
        taken = iter(inputs)
        args, named = map_tensors(lambda _: next(taken), (tuple(arguments), dict(keywords)))
        output = functional_call(module, state, args, named, tie_weights=True)
        numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        return map_tensors(lambda tensor: replace(seen_of(tensor), identity=numbers.get(id(tensor), -1)), output)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name; tied ones by their first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _unreal(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the CPU; inside a fake mode it has no memory and no values."""
    unreal = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    # Frozen parameters require a gradient here too, as layouts need all parameters on which a tensor depends.
    return unreal.requires_grad_(
        isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
    )


def _real(tensor: Tensor) -> Tensor:
    """A copy of a buffer, or a parameter's values; random values for a meta tensor."""
    differs = tensor.is_floating_point() or tensor.is_complex()
    if tensor.is_meta:  # a plan does not depend on the values
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        values = values.normal_(generator=torch.Generator().manual_seed(0)) * 0.02 if differs else values.zero_()
    else:
        values = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    return values.requires_grad_(isinstance(tensor, nn.Parameter) and differs)


def _any_numbers(tensor: Tensor) -> Tensor:
    """A copy on the CPU, with zeros in place of NaN, the values of blanks."""
    return tensor.detach().as_subclass(Tensor).to("cpu", copy=True).nan_to_num()


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which the forward may change."""
    return tensor.detach().to("cpu", copy=True)


def _plain(inputs: Any) -> Any:
    """Convert any mapping to a dictionary, which pytree traverses."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert inputs to positional and keyword arguments of the model."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
