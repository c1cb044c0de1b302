"""Leave the process group without the deadlock that waits there for gloo's threads.

A thread of gloo lets go of a finished message with the group's lock held, and where the message's tensors came from
Python, it needs Python's lock for it. The group's end takes Python's lock first and then the group's, so the two may
wait for each other for ever. (Seen in PyTorch 2.13, once in some thirty ends of a busy machine.) Who holds the group
last ends it: often this function, but a DistributedDataParallel that lives on does so later.
"""

import atexit
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm.shared_memory.process_group import KernelGroup


def leave_process_group() -> None:
    """End the process group and all that were made of it, once every rank is there.

    Every group sends one more message, which holds on to those before it. A rank among others holds on to that
    message to the end of its process, and with it to the group's connections: so no thread of gloo is the last to
    let go of one, whenever the group ends.
    """
    every = tuple(dist.distributed_c10d._world.pg_map)
    # A barrier in every group, begun in the same order on all ranks, waited for only once all are begun.
    last = [backend.barrier(dist.BarrierOptions()) for group in every if (backend := _gloo_of(group)) is not None]
    for work in last:
        work.wait()
    if dist.get_world_size() > 1:  # one process alone has no replicas that would hold its group
        atexit.register(_hold, last)
    for group in every:
        if isinstance(group, KernelGroup):
            group.close()
    dist.destroy_process_group()
    del last  # after the groups, whose threads are gone by now where there is no other reference


def _gloo_of(group: Any) -> Any | None:
    """The gloo that a group sends by, whichever back end the group has; None where it has none."""
    with suppress(RuntimeError):  # a group without a back end for the CPU
        backend = group._get_backend(torch.device("cpu"))
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        return backend if isinstance(backend, dist.ProcessGroupGloo) else None
    return None


def _hold(last: list[Any]) -> None:
    """Does nothing; what is to be called at the end is there until then, with its arguments."""
