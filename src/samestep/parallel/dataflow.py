"""Dataflow: which tensor of a forward was computed from which, also where autograd knows nothing of it.

Masks, indices and whatever a model computes under `torch.no_grad` have no autograd graph, and a pipeline must know
what they come from as well. So every operator is written down with what it read and what it wrote.

How it is kept: a node is written for each operator that writes or makes memory. A tensor is found by its identity
(its own last node) and by its memory (what was written to that last, by whichever view of it); its sources are both,
where the write came later. So `mask = ones.triu_(); causal = mask.bool()` is followed through the in-place change,
and a view made before a write is seen to have changed with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from samestep.data.nests import tensors_in
from samestep.torch_internals.operators import schema
from samestep.torch_internals.tensors import storage_id


@dataclass(frozen=True, kw_only=True)
class Node:
    """A computed value: the result of one operator, or an output tensor of a module."""

    time: int  # position in the sequence of beginnings and ends of calls
    parents: tuple[int, ...]  # the numbers of the nodes from which it was computed
    parameter: str | None = None  # the name of a parameter, which has no parents
    output: tuple[int, int] | None = None  # for an output: the time at which the call began, the tensor's number


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call that asks for values: its result is a Python value, or has a shape that depends on values."""

    time: int
    nodes: tuple[int, ...]  # from which the tensors whose values it asks for are computed
    module: str  # whose own forward asks
    function: str


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """The nodes of a forward, in topological order."""

    nodes: Sequence[Node] = ()
    changed: frozenset[int] = frozenset()  # nodes of outputs whose memory was written to afterwards
    results: Sequence[int] = ()  # nodes from which the model's output is computed
    asked: Sequence[Asked] = ()


@dataclass(kw_only=True)
class _Memory:
    """A storage, which several tensors may view."""

    node: int  # the node of its current contents
    written: int  # the number of the node that wrote to it last
    given: int = -1  # the last node of a call's output that is all of it


class DataflowRecorder:
    """Records what operators read and write. Tensors that no operator wrote (inputs, buffers) have no node."""

    def __init__(self) -> None:
        self.time = 0
        self._nodes: list[Node] = []
        self._by_tensor: dict[int, int] = {}  # the last node of a tensor, by its identity
        self._by_memory: dict[Any, _Memory] = {}
        self._outputs: dict[int, Any] = {}  # of a node that a module gave, its memory
        self._results: tuple[int, ...] = ()
        self._asked: list[Asked] = []
        self._kept: list[Any] = []  # kept alive, so that no id is reused

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Make nodes for these parameters, so that their uses are recorded."""
        for name, tensor in parameters.items():
            self._wrote(tensor, self._add(Node(time=0, parents=(), parameter=name)))

    def record(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> None:
        """Record a call of an operator."""
        read = tensors_in((args, keywords))
        made = tensors_in(output)
        if not made and not read:
            return
        written = _written(func, args, keywords)
        memories = {_memory_of(tensor) for tensor in read}
        parents = self._sources(read)
        if written or any(_memory_of(tensor) not in memories for tensor in made):
            node = self._add(Node(time=self.time, parents=parents))
            for tensor in (*written, *made):
                self._wrote(tensor, node)
        elif made and parents:  # other views of the same memory
            node = self._add(Node(time=self.time, parents=parents))
            for tensor in made:
                self._keep(tensor, node)

    def ask(self, module: str, function: str, tensors: Sequence[Tensor]) -> None:
        """Record that a module's own forward asks for the values of tensors."""
        self._asked.append(Asked(time=self.time, nodes=self._sources(tensors), module=module, function=function))

    def begin(self, arguments: Any) -> dict[int, tuple[int, ...]]:
        """Record the beginning of a call. Returns the sources of its argument tensors by id, for `end`."""
        self.time += 1
        return {id(tensor): self.sources(tensor) for tensor in tensors_in(arguments)}

    def end(self, began: int, before: Mapping[int, tuple[int, ...]], output: Any, *, whole: bool) -> None:
        """Record the end of a call: each output tensor becomes a node, except unchanged arguments.

        `whole`: the call is the model's own.
        """
        self.time += 1
        tensors = tensors_in(output)
        for number, tensor in enumerate(tensors):
            sources = self.sources(tensor)
            # An argument that comes back unchanged is still what it was: a pipeline sends it from where it was made.
            if before.get(id(tensor), None) == sources:
                continue
            node = self._add(Node(time=self.time, parents=sources, output=(began, number)))
            self._keep(tensor, node)
            self._outputs[node] = _memory_of(tensor)
            self._show(tensor, node, began)
        if whole:
            self._results = self._sources(tensors)

    def _show(self, tensor: Tensor, node: int, began: int) -> None:
        """Let views of an output's storage that the call itself has written depend on the output from now on."""
        memory = self._by_memory.get(_memory_of(tensor))
        if memory is None or self._nodes[memory.node].time < began:
            return
        several = self._nodes[memory.node].time == self.time  # another output of this call has the same storage
        memory.node = self._add(Node(time=self.time, parents=(memory.node, node))) if several else node
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            memory.given = memory.node

    def found(self) -> Dataflow:
        """The recorded dataflow, with outputs marked whose storage was written to afterwards."""
        changed = {
            node
            for node, key in self._outputs.items()
            if (memory := self._by_memory.get(key)) is not None and memory.written > node
        }
        return Dataflow(
            nodes=tuple(self._nodes), changed=frozenset(changed), results=self._results, asked=tuple(self._asked)
        )

    def sources(self, tensor: Tensor) -> tuple[int, ...]:
        """The nodes from which a tensor is computed: its own, and later writes to its storage."""
        node = self._by_tensor.get(id(tensor))
        memory = self._by_memory.get(_memory_of(tensor))
        if memory is not None and node is not None:
            node = max(node, memory.given)  # such as the tensor of which a call's output is a view
        if memory is None or (node is not None and memory.written <= node):
            return () if node is None else (node,)
        # Both: the later write, through another view, may have changed only a part of what the tensor sees.
        return (memory.node,) if node is None or node == memory.node else (node, memory.node)

    def needs_parameters(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from any of the parameters that are watched."""
        waiting, seen = list(self.sources(tensor)), set[int]()
        while waiting:
            number = waiting.pop()
            if self._nodes[number].parameter is not None:
                return True
            if number not in seen:
                seen.add(number)
                waiting += self._nodes[number].parents
        return False

    def _sources(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for tensor in tensors for node in self.sources(tensor)))

    def _add(self, node: Node) -> int:
        """Append a node; returns its number."""
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _wrote(self, tensor: Tensor, node: int) -> None:
        """Note that a tensor's memory was written to."""
        self._keep(tensor, node)
        before = self._by_memory.get(_memory_of(tensor))
        output_node = -1 if before is None else before.given
        self._by_memory[_memory_of(tensor)] = _Memory(node=node, written=node, given=output_node)

    def _keep(self, tensor: Tensor, node: int) -> None:
        """Make a node the tensor's last one; the tensor is kept alive, so that its id is not reused."""
        self._kept.append(tensor)
        self._by_tensor[id(tensor)] = node


def _written(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    tensors: list[Tensor] = []
    for number, name in _written_arguments(func):
        tensors += tensors_in(args[number] if number < len(args) else keywords.get(name))
    return tensors


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that an operator's schema marks as written to."""
    return tuple(
        (number, argument.name)
        for number, argument in enumerate(schema(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _memory_of(tensor: Tensor) -> Any:
    """A key for a tensor's storage; for a tensor without one, such as a sparse tensor, its id."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return "tensor", id(tensor)
