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
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.parallel.nests import tensors_in


@dataclass(frozen=True, kw_only=True)
class Node:
    """Something that was computed: by one operator, or a tensor as a module gave it."""

    time: int  # position among all beginnings and ends of calls at which it was computed
    parents: tuple[int, ...]  # the numbers of the nodes that it was computed from
    parameter: str | None = None  # a parameter of this name, which nothing computed
    output: tuple[int, int] | None = None  # of the call that began there, the tensor of this number in its output


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """All nodes of a forward; what is computed stands behind what it is computed from."""

    nodes: Sequence[Node] = ()
    changed: frozenset[int] = frozenset()  # nodes of outputs whose memory something was written to afterwards
    results: Sequence[int] = ()  # nodes from which the model's own output is computed


@dataclass(kw_only=True)
class _Memory:
    """A piece of memory that one or several tensors show."""

    node: int  # what was written to it last
    written: int  # when, as the number of the writing node
    given: int = -1  # the last node of a call's output that is all of it


class DataflowRecorder(TorchDispatchMode):
    """Writes down every operator's call. What no operator wrote (inputs, buffers) has no node."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self._nodes: list[Node] = []
        self._by_tensor: dict[int, int] = {}  # the last node of a tensor, by its identity
        self._by_memory: dict[Any, _Memory] = {}
        self._outputs: dict[int, Any] = {}  # of a node that a module gave, its memory
        self._results: tuple[int, ...] = ()
        self._kept: list[Any] = []  # alive, so that no two tensors share an identity

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Note where these parameters are read."""
        for name, tensor in parameters.items():
            self._wrote(tensor, self._add(Node(time=0, parents=(), parameter=name)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        output = func(*args, **keywords)
        given = tensors_in((args, keywords))
        made = tensors_in(output)
        if not made and not given:
            return output
        written = _written(func, args, keywords)
        memories = {_memory_of(tensor) for tensor in given}
        parents = self._sources(given)
        if written or any(_memory_of(tensor) not in memories for tensor in made):
            node = self._add(Node(time=self.time, parents=parents))
            for tensor in (*written, *made):
                self._wrote(tensor, node)
        elif made and parents:  # other views of the same memory
            node = self._add(Node(time=self.time, parents=parents))
            for tensor in made:
                self._keep(tensor, node)
        return output

    def begin(self, given: Any) -> dict[int, tuple[int, ...]]:
        """What the tensors of a call's arguments are computed from, by their identity, as `end` wants it."""
        self.time += 1
        return {id(tensor): self.sources(tensor) for tensor in tensors_in(given)}

    def end(self, began: int, before: Mapping[int, tuple[int, ...]], output: Any, *, whole: bool) -> None:
        """A call has ended. What it gave is a node of its own, but for arguments that it passed on as they were.

        `whole`: it was the model's own.
        """
        self.time += 1
        tensors = tensors_in(output)
        for number, tensor in enumerate(tensors):
            sources = self.sources(tensor)
            if before.get(id(tensor), None) == sources:
                continue
            node = self._add(Node(time=self.time, parents=sources, output=(began, number)))
            self._keep(tensor, node)
            self._outputs[node] = _memory_of(tensor)
            self._show(tensor, node, began)
        if whole:
            self._results = self._sources(tensors)

    def _show(self, tensor: Tensor, node: int, began: int) -> None:
        """Views of a tensor that the call itself has made come from its output from now on."""
        memory = self._by_memory.get(_memory_of(tensor))
        if memory is None or self._nodes[memory.node].time < began:
            return
        several = self._nodes[memory.node].time == self.time  # another output of this call lies there as well
        memory.node = self._add(Node(time=self.time, parents=(memory.node, node))) if several else node
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            memory.given = memory.node

    def found(self) -> Dataflow:
        """What was recorded; outputs that something wrote to after they were given are marked."""
        changed = {
            node
            for node, key in self._outputs.items()
            if (memory := self._by_memory.get(key)) is not None and memory.written > node
        }
        return Dataflow(nodes=tuple(self._nodes), changed=frozenset(changed), results=self._results)

    def sources(self, tensor: Tensor) -> tuple[int, ...]:
        """What a tensor is computed from: its own node, and what was written to its memory since."""
        node = self._by_tensor.get(id(tensor))
        memory = self._by_memory.get(_memory_of(tensor))
        if memory is not None and node is not None:
            node = max(node, memory.given)  # such as the tensor of which a call's output is a view
        if memory is None or (node is not None and memory.written <= node):
            return () if node is None else (node,)
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
        given = -1 if before is None else before.given
        self._by_memory[_memory_of(tensor)] = _Memory(node=node, written=node, given=given)

    def _keep(self, tensor: Tensor, node: int) -> None:
        """This node is the tensor's last one; the tensor is kept alive, as its identity would be given again."""
        self._kept.append(tensor)
        self._by_tensor[id(tensor)] = node


def _written(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else keywords.get(argument.name)
            found += tensors_in(given)
    return found


def _memory_of(tensor: Tensor) -> Any:
    """What tells a tensor's memory from others'; a tensor without, such as a sparse one, is known by itself."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return "tensor", id(tensor)
