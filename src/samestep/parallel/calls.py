"""Calls: the record of a traced forward, namely the modules that it called, in which order and with which tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from samestep.parallel.dataflow import Dataflow
from samestep.torch_internals import pytree
from samestep.torch_internals.tensors import base_of, is_view


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An input or output tensor of a traced module call."""

    identity: int  # equal for the same tensor object
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Node | None = None  # its autograd node; None: not computed from parameters
    # The node of the tensor of which it is a view, from which autograd continues after an in-place change.
    base: Node | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module. Arguments and output are nests in which every tensor is a `Seen`."""

    name: str  # in the model
    began: int  # position among all beginnings and ends of calls
    ended: int
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any
    functions: Mapping[str, int]  # how often each of PyTorch's functions was called in it, by name
    flops_before: int  # of the forward up to its beginning: products of matrices and convolutions
    flops_after: int  # and up to its end
    writes: bool = False  # whether it changed an argument in place that needs a gradient
    inside: str = ""  # the autograd.Function in whose forward it is made, by its name

    def inputs(self) -> list[Seen]:
        return seen_in((self.arguments, self.keywords))

    def outputs(self) -> list[Seen]:
        return seen_in(self.output)

    def passed_on(self, seen: Seen) -> bool:
        """Whether an output tensor is an input that the call did not change, not even in place."""
        return any(seen.identity == input_.identity and seen.source is input_.source for input_ in self.inputs())


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of PyTorch's scaled dot-product attention."""

    modules: tuple[str, ...]  # whose forwards were running, from the model to the innermost
    query: Seen
    key: Seen
    dropout: float = 0.0  # the share of probabilities that it drops


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The place at which a trace ended, since the forward asked for a value."""

    modules: tuple[str, ...]  # modules whose forwards were running, outermost first; the last one asked
    reason: str
    internal: Exception | None = None  # to be raised instead, where samestep's own code is wrong

    @property
    def module(self) -> str:
        """The module whose own forward asked."""
        return self.modules[-1] if self.modules else ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The calls of one forward, in the order in which they began."""

    calls: Sequence[Call]
    parameters: Mapping[Node, str]  # autograd's leaves, by the name of the parameter
    flops: int  # of the whole forward
    # Under which running forwards (names, from the model to the innermost) a parameter was used, by its first name.
    uses: Mapping[str, set[tuple[str, ...]]] = field(default_factory=dict)
    last_uses: Mapping[int, int] = field(default_factory=dict)  # a module's output, by identity -> position
    attentions: Sequence[Attention] = ()
    draws: Sequence[tuple[int, str, int]] = ()  # of random tensors: position, module whose forward draws, how many
    dataflow: Dataflow = field(default_factory=Dataflow)
    stop: Stop | None = None  # None: the forward was followed to its end
    decided: bool = False  # whether values of the inputs, or what is no tensor in them, may decide what is called
    # Modules whose own forward asks for values of what is computed from parameters, and by which function, where it
    # was followed with values.
    asking: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[Call]:
        """The calls of the module of that name."""
        return [call for call in self.calls if call.name == name]

    def used_outside(self, model: nn.Module, blocks: Sequence[str]) -> str | None:
        """The first parameter of the given blocks that is also used outside of their calls; None if there is none."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for block in blocks:
            for parameter in model.get_submodule(block).parameters():
                if any(not set(blocks) & set(running) for running in self.uses.get(names[parameter], ())):
                    return names[parameter]
        return None

    def computed_from(self, tensor: Seen, sources: Sequence[Seen]) -> set[int]:
        """The identities of the tensors in `sources` from which `tensor` is directly computed."""
        ends = {seen.source: seen.identity for seen in sources if seen.source is not None}
        waiting, seen_nodes, computed = [tensor.source], set[Node](), set[int]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen_nodes:
                continue
            seen_nodes.add(node)
            if node in ends:
                computed.add(ends[node])
            else:
                waiting += [before for before, _ in node.next_functions]
        return computed

    def behind(self, tensors: Iterable[Seen], *, up_to: Iterable[Seen] = ()) -> set[str]:
        """The parameters from which tensors are computed, without searching beyond the tensors in `up_to`."""
        up_to = list(up_to)
        seen = {tensor.source for tensor in up_to} | {tensor.base for tensor in up_to}
        waiting = [tensor.source for tensor in tensors if tensor.source not in seen]
        names: set[str] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.parameters:
                names.add(self.parameters[node])
            waiting += [before for before, _ in node.next_functions]
        return names


def seen_in(nest: Any) -> list[Seen]:
    """Every tensor of a nest, in order."""
    return [leaf for leaf in pytree.tree_leaves(nest, is_leaf=_is_seen) if _is_seen(leaf)]


def _is_seen(value: Any) -> bool:
    return isinstance(value, Seen)


def seen_of(tensor: Tensor) -> Seen:
    """Record a tensor."""
    return Seen(
        identity=id(tensor),
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        source=node_of(tensor),
        base=_source_of_base(tensor),
    )


def node_of(tensor: Tensor) -> Node | None:
    """Return the node that a tensor is the result of, or a leaf's own; None for a tensor outside of a graph."""
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.grad_fn
    # A leaf has no node of its own until something is computed from it. A view of a parameter that is made under
    # torch.no_grad() has none at all, although it says that it requires a gradient.
    with torch.enable_grad():
        following = tensor.view_as(tensor).grad_fn
    return following.next_functions[0][0] if following is not None else None


def _source_of_base(tensor: Tensor) -> Node | None:
    """Return the node of the base of a view of the whole base, such as a linear layer's output; else None."""
    base = base_of(tensor) if is_view(tensor) else None
    whole = base is not None and base.requires_grad and base.numel() == tensor.numel()
    return node_of(base) if base is not None and whole else None
