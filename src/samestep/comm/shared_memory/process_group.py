"""SharedMemoryGroup: a process group of CPU ranks on one host, whose collectives go through shared memory."""

# PyTorch's stub names the parameters of these methods in several ways, and overloads them.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from samestep.comm.shared_memory.kernel import OPERATIONS, TYPES, HostKernel, Kernel
from samestep.comm.shared_memory.work import Done, WorkQueue
from samestep.torch_internals import pytree
from samestep.torch_internals.groups import (
    PythonGroup,
    all_gather_single,
    answer_for_cpu,
    reduce_scatter_single,
    sequence_number,
)

Counter = Callable[[str, int, int], None]  # the collective's kind, the bytes of its message, the group's size


class Watcher(Protocol):
    """Interface for code that is notified when collectives run and when callers wait for them."""

    def running(self, kind: str) -> AbstractContextManager[None]:
        """The context in which a collective runs, in the caller's thread or in the group's."""
        ...

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """The context in which the caller waits for a collective or runs it."""
        ...


def gloo_group(gloo: dist.ProcessGroupGloo) -> dist.ProcessGroup:
    """PyTorch's own group over gloo."""
    group = dist.ProcessGroup(gloo.rank(), gloo.size())  # pyright: ignore[reportCallIssue]  # the stub has one more
    answer_for_cpu(group, gloo)
    return group


_IN_PLACE = ("all-reduce", "broadcast", "barrier")  # collectives whose results may stay this rank's own numbers


class KernelGroup(PythonGroup):
    """Takes over all-reduce, all-gather, broadcast and barrier of dense CPU tensors, on one host or several.

    All other operations, such as point-to-point messages, go to gloo. Which of the two runs a collective depends on
    its arguments only, so all ranks make the same choice.

    Every method that PyTorch looks up in Python (`PyProcessGroup.hpp`) is defined here or in `SharedMemoryGroup`,
    and gloo is called through `fallback`, never through `super()`: PyTorch's call of the base class holds the GIL
    while it waits for gloo's lock, and a thread of gloo holds that lock while it waits for the GIL, which deadlocks
    (seen in PyTorch 2.13).
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, kernel: Kernel) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore[reportCallIssue]  # the stub has one more
        answer_for_cpu(self, gloo)
        self.fallback: Any = gloo_group(gloo)
        self.kernel = kernel
        self._queue = WorkQueue()
        self._done = Done()
        self._open = True
        self._entered = 0
        self.counters: list[Counter] = []  # called for each collective that doesn't pass PyTorch's dispatcher
        self.watcher: Watcher | None = None
        # In a rehearsal: notes each collective's kind and bytes, and nothing is sent; results are zeros, or the own
        # numbers of this rank.
        self.rehearsed: Callable[[str, int], None] | None = None

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """One tensor [numbers] in place; sum, average, min, max or product."""
        opts = dist.AllreduceOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        operation = _operation(opts)
        if operation is None or len(tensors) != 1 or not _summable(tensors[0]):
            return self.fallback.allreduce(tensors, opts)
        return self._all_reduce(tensors, operation, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Several tensors, one after the other, as one work."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        operation = _operation(opts)
        if operation is None or not tensors or not all(map(_summable, tensors)):
            return self.fallback.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, operation, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """The root's tensor to all, in place, of any dtype."""
        opts = dist.BroadcastOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if len(tensors) != 1 or not _dense(tensors[0]):
            return self.fallback.broadcast(tensors, opts)
        (tensor,), root = tensors, opts.rootRank
        return self._run("broadcast", tensor.nbytes, opts, tensors, lambda: self.kernel.broadcast(tensor, root))

    def barrier(self, opts: Any = None) -> Any:
        """Return when every rank has come."""
        opts = dist.BarrierOptions() if opts is None else opts
        return self._run("barrier", 0, opts, [], self.kernel.barrier)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """`input` [k] of every rank into `output` [ranks * k]."""
        opts = AllgatherOptions() if opts is None else opts
        if not self._gathers([output], [input]):
            return all_gather_single(self.fallback, output, input, opts)
        return self._gather([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not self._gathers(outputs, inputs):
            return self.fallback.all_gather_single_coalesced(outputs, inputs, opts)
        return self._gather(outputs, inputs, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not self._gathers(outputs, inputs):
            return self.fallback.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._gather(outputs, inputs, opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Every rank's tensor into a list of tensors of its shape, by way of one flat tensor."""
        opts = AllgatherOptions() if opts is None else opts
        if len(output_tensors) != 1 or not _alike(output_tensors[0], input_tensors[0]):
            return self.fallback.allgather(output_tensors, input_tensors, opts)
        (parts,), (input_,) = output_tensors, input_tensors

        def run() -> None:
            whole = input_.new_empty(len(parts), input_.numel())
            self.kernel.all_gather(input_, whole)
            for part, numbers in zip(parts, whole, strict=True):
                part.copy_(numbers.view_as(part))

        return self._run("all-gather", input_.nbytes * self.size(), opts, output_tensors, run)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        return self.fallback.reduce_scatter(*args, **kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        return self.fallback.all_to_all_single(*args, **kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Any:
        return self.fallback.alltoall_base(*args, **kwargs)

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.fallback.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.fallback.recv(tensors, src, tag)

    def entered_collectives(self) -> int:
        """How many collectives this rank has entered, over shared memory and over gloo."""
        return self._entered + sequence_number(self.fallback)

    def abort(self) -> None:
        """Let every rank that waits in a collective raise."""
        if self._open:
            self.kernel.abort()
        self.fallback.abort()

    def close(self) -> None:
        """Let go of the shared memory, after the collectives that were called."""
        if self._open:
            self._open = False
            self._queue.close()
            self.kernel.close()

    def _all_reduce(self, tensors: Sequence[Tensor], operation: int, opts: Any) -> Any:
        """Run or enqueue an all-reduce of some tensors."""

        def run() -> None:
            for tensor in tensors:
                self.kernel.all_reduce(tensor, operation)

        return self._run("all-reduce", _bytes(tensors), opts, tensors, run)

    def _gathers(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Whether the kernel supports this all-gather: dense CPU tensors, outputs of `ranks` times the bytes."""
        return all(map(_dense, (*outputs, *inputs))) and all(
            out.nbytes == input_.nbytes * self.size() for out, input_ in zip(outputs, inputs, strict=True)
        )

    def _gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Run or enqueue an all-gather for each pair of tensors."""

        def run() -> None:
            for out, input_ in zip(outputs, inputs, strict=True):
                self.kernel.all_gather(input_, out)

        return self._run("all-gather", _bytes(outputs), opts, outputs, run)

    def _run(self, kind: str, message: int, opts: Any, result: Any, collective: Callable[[], None]) -> Any:
        """Count and run a collective: now for a caller that waits, in the queue for one that doesn't (`asyncOp`).

        `message`: its bytes, which are passed to the counters. All collectives of a group go through one queue, in
        the order of the calls.
        """
        if self.rehearsed is not None:
            self.rehearsed(kind, message)
            if kind not in _IN_PLACE:
                pytree.tree_map_only(Tensor, Tensor.zero_, result)
            return self._done
        self._entered += 1
        for count in self.counters:
            count(kind, message, self.size())
        watcher = self.watcher
        waiting = nullcontext if watcher is None else partial(watcher.waiting, kind)
        if watcher is not None:
            collective = partial(_within, partial(watcher.running, kind), collective)
        if not opts.asyncOp:
            with waiting():
                self._queue.run(collective)
            return self._done
        return self._queue.add(collective, result, waiting)


class SharedMemoryGroup(KernelGroup):
    """Takes over reduce and reduce-scatter as well, for ranks that all share one host."""

    def __init__(self, gloo: dist.ProcessGroupGloo, kernel: HostKernel) -> None:
        super().__init__(gloo, kernel)
        self._host = kernel

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """One tensor [numbers], summed (or another of OPERATIONS) on the root alone.

        `torch.distributed.reduce` calls this; C++ code, which in PyTorch calls no reduce, would find gloo's.
        """
        opts = dist.ReduceOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        operation = _operation(opts)
        if operation is None or len(tensors) != 1 or not _summable(tensors[0]):
            return self.fallback.reduce(tensors, opts)
        (tensor,), root = tensors, opts.rootRank
        return self._run("reduce", tensor.nbytes, opts, tensors, lambda: self._host.reduce(tensor, root, operation))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not self._scatters([output], [input], opts):
            return reduce_scatter_single(self.fallback, output, input, opts)
        return self._scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not self._scatters(outputs, inputs, opts):
            return self.fallback.reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._scatter(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not self._scatters(outputs, inputs, opts):
            return self.fallback.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._scatter(outputs, inputs, opts)

    def _scatters(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> bool:
        """Whether the kernel supports this reduce-scatter: its reduction and dtype, dense CPU tensors, sizes."""
        return (
            _operation(opts) is not None
            and all(map(_summable, (*outputs, *inputs)))
            and all(
                input_.numel() == out.numel() * self.size() and input_.dtype == out.dtype
                for out, input_ in zip(outputs, inputs, strict=True)
            )
        )

    def _scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Run or enqueue a reduce-scatter for each pair of tensors."""
        operation = _operation(opts)
        assert operation is not None

        def run() -> None:
            for out, input_ in zip(outputs, inputs, strict=True):
                self._host.reduce_scatter(input_, out, operation)

        return self._run("reduce-scatter", _bytes(inputs), opts, outputs, run)


def _within(around: Callable[[], AbstractContextManager[None]], collective: Callable[[], None]) -> None:
    with around():
        collective()


def _operation(opts: Any) -> int | None:
    """The kernel's number of the reduction in the options; None if only gloo supports it."""
    operation = opts.reduceOp
    return OPERATIONS.get(operation.op if hasattr(operation, "op") else operation)


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor is a contiguous CPU tensor. Raises TypeError for one without memory, such as a DTensor."""
    if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided and not tensor.data_ptr():
        raise TypeError(
            f"a collective is given a {type(tensor).__name__}, which has no memory of its own; "
            "give it the local tensor (DTensor.to_local())"
        )
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()


def _summable(tensor: Tensor) -> bool:
    return tensor.dtype in TYPES and _dense(tensor)


def _alike(parts: Sequence[Tensor], input_: Tensor) -> bool:
    """Whether all ranks send tensors of the same shape, judged by the shapes of the output tensors."""
    return _dense(input_) and all(part.shape == input_.shape and _dense(part) for part in parts)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
